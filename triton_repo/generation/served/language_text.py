"""Stands for `foundation/standalone/language_text.py`, which lies in its place next to a served model."""

from foundation.standalone.language_text import LanguageText

__all__ = ["LanguageText"]
