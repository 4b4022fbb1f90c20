"""Stands for `foundation/standalone/decoding_rules.py`, which lies in its place next to a served model."""

from foundation.standalone.decoding_rules import Logits, Rules, Text, searching

__all__ = ["Logits", "Rules", "Text", "searching"]
