"""Compress fine-tuned Transformers: what drives the stages, from the recipe to the report."""

import foundation as foundation  # sets environment variables that torch reads on import
