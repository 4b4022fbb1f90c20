"""Placeholder for `foundation/standalone/pieces.py`, which replaces it next to a served model."""

from foundation.standalone.pieces import Pieces

__all__ = ["Pieces"]
