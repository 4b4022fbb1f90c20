"""Rows that name the adapter which is to answer them: a text, or a pair of texts, and a name.

Such a row is a text, or a pair, to everything that reads texts; a model without adapters reads only that. A model with adapters reads the
name too, and refuses rows without one. The name is no part of the text, so that no text can choose an adapter.

This file is copied into the server next to a model with adapters, and imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHOWN = 10
"""Most names that a message lists."""


class AdaptedText(str):
    """A text that names its adapter."""

    adapter: str
    """Name of the adapter."""

    def __new__(cls, text: str, adapter: str) -> AdaptedText:
        """Returns a text with the name of its adapter."""
        made = super().__new__(cls, text)
        made.adapter = adapter
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles both."""
        return AdaptedText, (str(self), self.adapter)


class AdaptedPair(tuple[str, str]):
    """A pair of texts that names its adapter."""

    adapter: str
    """Name of the adapter."""

    def __new__(cls, texts: tuple[str, str], adapter: str) -> AdaptedPair:
        """Returns a pair with the name of its adapter."""
        made = super().__new__(cls, texts)
        made.adapter = adapter
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles both."""
        return AdaptedPair, (tuple(self), self.adapter)


def adapter_of(row: Any) -> str | None:
    """Returns the name of the adapter of a row; None where it names none."""
    return row.adapter if isinstance(row, AdaptedText | AdaptedPair) else None


def with_adapter(row: Any, name: str) -> AdaptedText | AdaptedPair:
    """Returns a text, or a pair of texts, with the name of its adapter."""
    return AdaptedPair((row[0], row[1]), name) if isinstance(row, tuple) else AdaptedText(row, name)


def plain(row: Any) -> Any:
    """Returns a row without the name of its adapter."""
    if isinstance(row, AdaptedText):
        return str(row)
    return (row[0], row[1]) if isinstance(row, AdaptedPair) else row


def as_read(rows: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Returns rows as a model reads them: without the names of adapters, where it has none.

    Args:
        rows: The rows.
        names: Names of the adapters of the model.
    """
    return list(rows) if names else [plain(row) for row in rows]


def index_of(row: Any, names: Sequence[str]) -> int:
    """Returns the number of the adapter of a row.

    Args:
        row: The row.
        names: Names of the adapters of a model.

    Raises:
        ValueError: The row names no adapter, or none of these; the message lists them.
    """
    name = adapter_of(row)
    if name in names:
        return names.index(name)
    given = "no adapter given" if not name else f"adapter {name[:40]!r} given"
    raise ValueError(f"{given}; {listed(names)} {'is' if len(names) == 1 else 'are'} allowed")


def listed(names: Sequence[str]) -> str:
    """Returns the first of some names, for a message."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
