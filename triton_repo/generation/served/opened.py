"""Parts of a served model, whatever its engine."""

from __future__ import annotations

from dataclasses import dataclass

from .engine import Engine
from .request import Limits, Tokenizer


@dataclass(frozen=True)
class Opened:
    """A model that is ready to answer."""

    tokenizer: Tokenizer
    limits: Limits
    engine: Engine
    """Not started yet."""
    held: int
    """Letters at the end of a text that later tokens may change; see `pieces.Decoded`."""
