"""Placeholder for `foundation/standalone/e_process.py`, which replaces it next to a served cascade."""

from foundation.standalone.e_process import EProcess

__all__ = ["EProcess"]
