"""Stands for `compress/standalone/pieces.py`, which lies in its place beside a served model."""

from compress.standalone.pieces import Pieces

__all__ = ["Pieces"]
