"""Parts of a served model, whatever its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .engine import Engine
from .request import Limits, Tokenizer

if TYPE_CHECKING:
    from .structures import Structures


@dataclass(frozen=True)
class Opened:
    """A model that is ready to answer."""

    tokenizer: Tokenizer
    limits: Limits
    engine: Engine
    """Not started yet."""
    held: int
    """Letters at the end of a text that later tokens may change; see `pieces.Decoded`."""
    structures: Structures | None = None
    """Structures of its answers, where the logits are ours."""
