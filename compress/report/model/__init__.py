"""The one description of report.json: a model for each of its maps."""
