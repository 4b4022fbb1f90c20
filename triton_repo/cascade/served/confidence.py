"""Placeholder for `foundation/standalone/confidence.py`, which replaces it next to a served cascade."""

from foundation.standalone.confidence import Score, confidence, kept

__all__ = ["Score", "confidence", "kept"]
