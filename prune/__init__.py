"""Pruning methods, one algorithm a file."""
