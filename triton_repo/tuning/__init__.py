"""The settings of a served model, searched by measured load, one part per file."""
