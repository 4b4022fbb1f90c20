"""Stands for `compress/standalone/draft_folder.py`, which lies in its place beside a served model."""

from compress.standalone.draft_folder import with_stand_in

__all__ = ["with_stand_in"]
