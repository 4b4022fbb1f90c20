"""Placeholder for `foundation/standalone/decoding_rules.py`, which replaces it next to a served model."""

from foundation.standalone.decoding_rules import Logits, Rules, Structure, Text, searching

__all__ = ["Logits", "Rules", "Structure", "Text", "searching"]
