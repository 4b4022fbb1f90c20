"""A run between its recipe and its report: implicit steps, what is checked before, what is cached, what was made so far."""
