"""Modules that are copied into model repositories and run on servers; they import nothing else of this project."""
