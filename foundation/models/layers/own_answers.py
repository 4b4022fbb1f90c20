"""Language models whose tokens several processes share answer for own tokens alone: logits of a vocabulary are larger than all else.

    logits of own tokens [b, T, V] -> losses of own tokens [b, T] -> gathered [b, L] -> one loss for each row, in every process

Within `answering` the output layer of a shared model reads own tokens alone (`foundation.models.architecture.context`), and
`foundation.training.losses.tokens` gathers numbers in the place of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from foundation.models.layers.token_shares import Group

_ANSWERING: ContextVar[Group | None] = ContextVar("answering", default=None)


@contextmanager
def answering(group: Group | None) -> Iterator[None]:
    """Within the block, language models give the logits of own tokens; None: of all."""
    token = _ANSWERING.set(group)
    try:
        yield
    finally:
        _ANSWERING.reset(token)


def sharers() -> Group | None:
    """Returns the processes that have logits of own tokens now; None where logits belong to all tokens."""
    return _ANSWERING.get()
