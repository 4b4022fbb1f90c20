"""The sections of the page, one file each: they turn figures of the report into strings and positions for the templates."""
