"""What a served model consists of, whatever its engine."""

from __future__ import annotations

from dataclasses import dataclass

from .asked import Limits, Tokenizer
from .engine import Engine


@dataclass(frozen=True)
class Opened:
    """A model that is ready to answer."""

    tokenizer: Tokenizer
    limits: Limits
    engine: Engine
    """Not started yet."""
    held: int
    """Letters at the end of a text that later tokens may change; see `pieces.Decoded`."""
