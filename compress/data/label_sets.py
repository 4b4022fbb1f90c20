"""Converts cells that name any number of labels to sets of class ids.

A cell is a list of labels, as json, jsonl, parquet and the Hub have them, or a text with the labels separated by commas; an empty list or
text says that no label holds. What a single label means is said in `compress.data.labels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.core.errors import InputError
from compress.core.shown import shown
from compress.data import labels
from compress.data.labels import Labelled


@dataclass(frozen=True)
class _Members:
    """All labels of a source, one after the other."""

    source: Labelled
    labels: list[Any]
    rows: list[int]
    """The row of each label."""

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.source.label_names

    def place(self, index: int) -> str:
        return self.source.place(self.rows[index])


def set_names(sources: Sequence[Labelled]) -> tuple[str, ...]:
    """Returns the names of all labels of a train split, ordered by id.

    Raises:
        InputError: See `compress.data.labels.class_names`; or a cell is neither a list nor a text.
    """
    return labels.class_names(_members(sources))


def set_ids(sources: Sequence[Labelled], names: tuple[str, ...], origin: str, *, numbered: bool) -> np.ndarray:
    """Returns which labels hold for every row, bool [n, C].

    Args:
        sources: The files of the split.
        names: Names of the labels by id.
        origin: Where the names come from, for the message.
        numbered: Whether the names come with ids of their own, as those of a model do.

    Raises:
        InputError: A label is not among the names, or a cell is neither a list nor a text; the message gives file and line.
    """
    members = _members(sources)
    ids = labels.class_ids(members, names, origin, numbered=numbered)
    sizes = [len(source.labels) for source in sources]
    starts = np.cumsum([0, *sizes[:-1]])
    rows = np.concatenate([start + np.array(each.rows, np.int64) for start, each in zip(starts, members, strict=True)])
    found = np.zeros((sum(sizes), len(names)), bool)
    found[rows, ids] = True
    return found


def _members(sources: Sequence[Labelled]) -> list[_Members]:
    made = []
    for source in sources:
        each = _Members(source, [], [])
        for row, cell in enumerate(source.labels):
            found = _split(cell, source, row)
            each.labels.extend(found)
            each.rows.extend([row] * len(found))
        made.append(each)
    return made


def _split(cell: Any, source: Labelled, row: int) -> list[Any]:
    if isinstance(cell, list | tuple | np.ndarray):
        return list(cell)
    if isinstance(cell, str):
        return [part.strip() for part in cell.split(",")] if cell.strip() else []
    if isinstance(cell, int) and not isinstance(cell, bool):  # a column in which every row happens to have one label
        return [cell]
    raise InputError(f"{source.place(row)}: labels {shown(cell, 40)}; a list of labels, or a text with commas between them, is allowed")
