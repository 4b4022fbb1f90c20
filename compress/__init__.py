"""Compress fine-tuned Transformers: what drives the stages, from the recipe to the report."""

import foundation as foundation  # its settings of the environment hold before torch is imported
