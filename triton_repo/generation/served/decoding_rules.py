"""Placeholder for `foundation/standalone/decoding_rules.py`, which replaces it next to a served model."""

from foundation.standalone.decoding_rules import Logits, Rules, Text, searching

__all__ = ["Logits", "Rules", "Text", "searching"]
