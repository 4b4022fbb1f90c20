"""Two-level scales of int4 weights, and offsets: how they are chosen."""
