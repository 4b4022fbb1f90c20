"""Sends a run to a tracking server, where the recipe has a `track`: its settings, its figures, its report and the served model."""
