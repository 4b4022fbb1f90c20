"""Folders that other programs load, written from a variant of a run: one file for each format, listed in `table`."""
