"""Engines, one a file: what each builds, how it is opened, and what its own graph says of precisions."""
