"""Stands for `foundation/standalone/pieces.py`, which lies in its place beside a served model."""

from foundation.standalone.pieces import Pieces

__all__ = ["Pieces"]
