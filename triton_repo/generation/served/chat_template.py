"""Stands for `foundation/standalone/chat_template.py`, which lies in its place next to a served model."""

from foundation.standalone.chat_template import TemplateRefused

__all__ = ["TemplateRefused"]
