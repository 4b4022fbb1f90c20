"""What a model answers, how good that is, how close to another, and how fast."""
