"""The losses of distillation, one a file, and what they have in common (`loss`); `distill.presets` combines them."""
