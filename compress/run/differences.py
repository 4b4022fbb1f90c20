"""Where two pieces of plain data (maps, lists and values) differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Difference(NamedTuple):
    """A value that is not the same in both."""

    path: str
    """Key path, such as `stages[1].prune.sparsity`."""
    before: object
    """The value in the first; None where there is none."""
    now: object
    """The value in the second; None where there is none."""


def differences(before: object, now: object, path: str = "") -> Iterator[Difference]:
    """Yields the values that differ, in the order of the data; lists of different lengths are one value."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif before != now:
        yield Difference(path, before, now)
