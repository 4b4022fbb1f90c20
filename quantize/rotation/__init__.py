"""Rotations that spread outlier channels before rounding, folded into the weights."""
