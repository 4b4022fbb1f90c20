"""Pruning against the clock: from shapes to milliseconds of an engine, and from a latency target to a shape."""
