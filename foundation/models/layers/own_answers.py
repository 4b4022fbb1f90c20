"""With shared tokens, each process computes the logits of a language model for its own tokens only: they are the largest tensors.

    logits of own tokens [b, T, V] -> losses of own tokens [b, T] -> gathered [b, L] -> one loss for each row, in every process

Within `answering` the output layer of a shared model reads only own tokens (`foundation.models.architecture.context`), and
`foundation.training.losses.tokens` gathers losses instead of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from foundation.models.layers.token_shares import Group

_ANSWERING: ContextVar[Group | None] = ContextVar("answering", default=None)


@contextmanager
def answering(group: Group | None) -> Iterator[None]:
    """Within the block, language models return the logits of own tokens only; None: of all tokens."""
    token = _ANSWERING.set(group)
    try:
        yield
    finally:
        _ANSWERING.reset(token)


def sharers() -> Group | None:
    """Returns the group of processes whose logits cover only own tokens now; None if logits cover all tokens."""
    return _ANSWERING.get()
