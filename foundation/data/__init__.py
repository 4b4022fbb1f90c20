"""Rows in memory: the settings of a data set, tables, splits and groups. `compress.reading` reads them."""
