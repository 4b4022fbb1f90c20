"""Compress fine-tuned Transformers: recipe, pipeline, artifacts, training, evaluation and report."""
