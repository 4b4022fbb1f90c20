"""Stands for `foundation/standalone/draft_folder.py`, which lies in its place next to a served model."""

from foundation.standalone.draft_folder import with_stand_in

__all__ = ["with_stand_in"]
