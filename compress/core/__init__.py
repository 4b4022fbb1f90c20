"""The ground: errors, typed configs, the facts of tasks, progress, and what every other room may use."""
