"""Modules that are copied to servers and run there alone: they import nothing of this project."""
