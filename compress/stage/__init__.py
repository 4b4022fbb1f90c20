"""What a stage is, and what the pipeline hands it."""
