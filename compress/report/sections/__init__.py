"""The sections of the page, one subject a file: figures of the report turned into strings and positions for the templates."""
