"""Distillation losses: one file each, with their shared base class in `loss`; `distill.presets` combines them."""
