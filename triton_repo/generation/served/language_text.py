"""Placeholder for `foundation/standalone/language_text.py`, which replaces it next to a served model."""

from foundation.standalone.language_text import LanguageText

__all__ = ["LanguageText"]
