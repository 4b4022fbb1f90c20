"""Placeholder for `foundation/standalone/draft_folder.py`, which replaces it next to a served model."""

from foundation.standalone.draft_folder import with_stand_in

__all__ = ["with_stand_in"]
