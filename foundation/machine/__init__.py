"""The machine of a run: its hardware, its child processes, and distributed training."""
