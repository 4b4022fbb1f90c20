"""Placeholder for `foundation/standalone/stretches.py`, which replaces it next to a served model."""

from foundation.standalone.stretches import read_again_at, stretches

__all__ = ["read_again_at", "stretches"]
