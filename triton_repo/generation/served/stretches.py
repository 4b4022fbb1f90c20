"""Stands for `compress/standalone/stretches.py`, which lies in its place beside a served model."""

from compress.standalone.stretches import read_again_at, stretches

__all__ = ["read_again_at", "stretches"]
