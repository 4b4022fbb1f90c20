"""Losses against a teacher: one file each, with their shared base class in `loss`; `presets` is their typed union."""
