"""Writes, starts, checks and load-tests a Triton model repository."""
