"""A kill of a training, for tests of what continues after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from foundation.training import train


class Killed(Exception):
    """Stands for a kill."""


@contextlib.contextmanager
def dying(step: int) -> Iterator[None]:
    """Every process is killed after a step; every step before has its checkpoint."""
    original, seconds = train._Loop._look, train.TrainConfig.model_fields["checkpoint_seconds"].default

    def look(self: Any, *arguments: Any) -> None:
        if self.history.steps == step + 1:
            raise Killed
        original(self, *arguments)

    train._Loop._look = look  # type: ignore[method-assign]
    train.TrainConfig.model_fields["checkpoint_seconds"].default = 0.0
    train.TrainConfig.model_rebuild(force=True)
    try:
        yield
    finally:
        train._Loop._look = original  # type: ignore[method-assign]
        train.TrainConfig.model_fields["checkpoint_seconds"].default = seconds
        train.TrainConfig.model_rebuild(force=True)
