"""Stands for `foundation/standalone/pieces.py`, which lies in its place next to a served model."""

from foundation.standalone.pieces import Pieces

__all__ = ["Pieces"]
