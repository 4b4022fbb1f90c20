"""Models: import, loading, size, and architecture-independent structure."""
