"""The machine that a run is on: its hardware, its child processes, and the processes that train together."""
