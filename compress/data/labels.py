"""Converts the labels in files to class ids or values.

Class labels are compared as text: 1, 1.0 and "1" are the same. The class names come from the model (its id2label) if it has them, else from
the train split, sorted (numerically if all are integers). Integers that are not class names count as class ids. A split whose labels are
all -1 is unlabelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from compress.core.errors import InputError, nearest
from compress.core.tasks import tasks_with

UNLABELLED = "-1"
SHOWN_PROBLEMS = 3
LARGEST = float(np.finfo(np.float32).max)


class Labelled(Protocol):
    """Labels as they appear in a file, with their places."""

    @property
    def labels(self) -> Sequence[Any]:
        """One label per row."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Class names by id, as given by the file itself; () if it has none."""

    def place(self, index: int) -> str:
        """File and line of a row, for error messages."""


def text_of(label: Any) -> str:
    """Returns a class label as text, for comparison; empty if there is no label."""
    if isinstance(label, str):
        return label.strip()
    if label is None or isinstance(label, list | dict | bytes):
        return ""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).lower() if isinstance(label, bool) else str(label)


def is_unlabelled(sources: Sequence[Labelled]) -> bool:
    """Whether every label of a split is -1."""
    return all(_is_minus_one(label) for source in sources for label in source.labels)


def class_names(sources: Sequence[Labelled]) -> tuple[str, ...]:
    """Returns the class names of a train split, ordered by id.

    Raises:
        InputError: There are fewer than two classes, too many for a column of class labels, or a row without a label.
    """
    own = {source.label_names for source in sources}
    if len(own) == 1 and own != {()}:
        return own.pop()
    _raise(_missing_labels(sources))
    found = {text_of(label) for source in sources for label in source.labels}
    rows = sum(len(source.labels) for source in sources)
    if len(found) < 2:
        raise InputError(f"{sources[0].place(0)}: all {rows} train rows have the label {found.pop()!r}; two or more classes are needed")
    if len(found) > 20 and 2 * len(found) > rows:
        values = tasks_with(lambda row: row.answer == "value")
        advice = f"set data.columns.label to the column of the class labels (to predict numbers, set task: {values})"
        raise InputError(f"{sources[0].place(0)}: {len(found)} different labels in {rows} train rows; {advice}")
    whole = all(_is_whole(name) for name in found)
    return tuple(sorted(found, key=int) if whole else sorted(found))


def class_ids(sources: Sequence[Labelled], names: tuple[str, ...], origin: str) -> np.ndarray:
    """Returns the class id of every row, int64 [n].

    Args:
        sources: The files of the split.
        names: Class names by id.
        origin: Where the names come from, for the message.

    Raises:
        InputError: A label is not among the names; the message lists the first few with file and line.
    """
    _raise(_missing_labels(sources))
    problems: list[str] = []
    ids: list[int] = []
    for source in sources:
        known = _ids_by_text(source.label_names, names)
        for index, label in enumerate(source.labels):
            found = known.get(text_of(label), -1)
            ids.append(found)
            if found < 0:
                given = text_of(label)
                problems.append(f"{source.place(index)}: label {given!r:.60}; allowed by {origin}: {_shown(names)}{nearest(given, names)}")
    _raise(problems)
    return np.array(ids, dtype=np.int64)


def values(sources: Sequence[Labelled]) -> np.ndarray:
    """Returns the value of every row, float32 [n].

    Raises:
        InputError: A label is not a finite number; the message lists the first few with file and line.
    """
    problems: list[str] = []
    found: list[float] = []
    for source in sources:
        for index, label in enumerate(source.labels):
            value = _number(label)
            found.append(value)
            if not math.isfinite(value):
                problems.append(f"{source.place(index)}: label {str(label)!r:.60}; a finite number is allowed")
    _raise(problems)
    return np.array(found, dtype=np.float32)


def _number(label: Any) -> float:
    if isinstance(label, bool) or (isinstance(label, str) and "_" in label):  # float() would accept True and "1_000"
        return math.nan
    try:
        value = float(label)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if abs(value) <= LARGEST else math.nan


def _ids_by_text(own_names: tuple[str, ...], names: tuple[str, ...]) -> dict[str, int]:
    ids = {str(index): index for index in range(len(names))}
    by_name = {name.casefold(): index for index, name in enumerate(names)}
    if own_names and {name.casefold() for name in own_names} == set(by_name):
        # Data set and model have the same class names, perhaps in another order: match by name, not by number.
        ids = {str(index): by_name[name.casefold()] for index, name in enumerate(own_names)}
        ids |= {name: by_name[name.casefold()] for name in own_names}
    return ids | {name: index for index, name in enumerate(names)}


def _missing_labels(sources: Sequence[Labelled]) -> list[str]:
    empty = [(source, index) for source in sources for index, label in enumerate(source.labels) if not text_of(label)]
    return [f"{source.place(index)}: no label ({source.labels[index]!r:.40}); a name or a number is allowed" for source, index in empty]


def _is_minus_one(label: Any) -> bool:
    return text_of(label) in (UNLABELLED, "-1.0", "-1.000")


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")


def _raise(problems: list[str]) -> None:
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS]
        if more > 0:
            shown[-1] += f" (and {more} more rows like these)"
        raise InputError(*shown)
