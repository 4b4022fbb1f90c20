"""Evenly spaced choices: the same ones every time, from the first to the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], count: int) -> list[T]:
    """Returns `count` evenly spaced items, or all items if there are no more."""
    return [items[index * len(items) // count] for index in range(count)] if len(items) > count else list(items)
