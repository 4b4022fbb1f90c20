"""Exact compaction: units that zeros have disconnected are removed, without training."""
