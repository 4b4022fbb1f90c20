"""Graphs that generate text: keys and values of earlier tokens are kept as state, so that a step computes only its new tokens."""
