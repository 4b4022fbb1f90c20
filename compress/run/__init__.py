"""A run between its recipe and its report: implicit steps, checks, cache, state and timing."""
