"""Placeholder for `foundation/standalone/chat_template.py`, which replaces it next to a served model."""

from foundation.standalone.chat_template import TemplateRefused

__all__ = ["TemplateRefused"]
