"""Converts the labels in files to class ids or values.

Class labels are compared as text: 1, 1.0 and "1" are the same, and so are names that differ only in spaces or case, where no two classes
do (`compress.reading.same_name`). The class names come from the model (its id2label) if it has them, else from the train split, sorted
(numerically if all are integers). What a label means:

    a class name                    that class
    an integer that is none         a class id only if something outside the labels numbers the classes: the data set's own list of names
                                    (a ClassLabel column), or the id2label of a model, none of whose names is an integer; else an error
    NaN, infinity, null, ""         an error, as text too ("nan"), unless a class is called so

With names such as 1 to 5, taken from the train split or a model, a label 0 is thus an error and never the first class. A ClassLabel column
(of the Hub, or of a file that says so: `compress.reading.features`) always holds ids: they are matched with the model by name where the
names are the same, else by position, unless a name that both have contradicts it. A split whose labels are all -1, or lists of -1, is
unlabelled.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from compress.reading.same_name import NONE, SameName, by_place, listed, merged, order_of
from foundation.core.errors import InputError, Problem, nearest
from foundation.core.shown import shown
from foundation.labels.tasks import tasks_with

UNLABELLED = "-1"
SHOWN_PROBLEMS = 3
LARGEST = float(np.finfo(np.float32).max)
LONGEST_LABEL = 1000


class Labelled(Protocol):
    """Labels as they appear in a file, with their places."""

    @property
    def labels(self) -> Sequence[object]:
        """One label per row."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Class names by id, as given by the file itself; () if it has none."""

    def place(self, index: int) -> str:
        """File and line of a row, for error messages."""


class OfFile(Labelled, Protocol):
    """The same, of a file with a name."""

    @property
    def name(self) -> str:
        """The file or data set."""


S = TypeVar("S", bound=OfFile)


def text_of(label: object) -> str:
    """Returns a class label as text, for comparison; empty if there is no label."""
    if isinstance(label, str):
        return label.strip()
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label) if label.bit_length() < LONGEST_LABEL else ""
    if label is None or isinstance(label, list | dict | bytes):
        return ""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).lower() if isinstance(label, bool) else str(label)


def drop_unlabelled(sources: dict[str, list[S]], log: Callable[[str], None]) -> list[str]:
    """Takes splits without labels out of the sources, in place; returns their names.

    Raises:
        InputError: Train is one of them.
    """
    unlabelled = [name for name, found in sources.items() if is_unlabelled(found)]
    for name in unlabelled:
        if name == "train":
            raise InputError(
                sources[name][0].name,
                "all labels are -1, so train is unlabelled",
                "labelled train rows are needed",
                "or set data.train_labels: false",
            )
        log(f"data: all labels of {name} are -1; the split counts as unlabelled and is not used")
        del sources[name]
    return unlabelled


def is_unlabelled(sources: Sequence[Labelled]) -> bool:
    """Whether every label of a split is -1."""
    return all(_is_minus_one(label) for source in sources for label in source.labels)


def class_names(sources: Sequence[Labelled]) -> tuple[str, ...]:
    """Returns the class names of a train split, ordered by id.

    Raises:
        InputError: There are fewer than two classes, too many for a column of class labels, or a row without a label.
    """
    own = own_names(sources)
    if own:
        return own
    texts = [text_of(label) for source in sources for label in source.labels]
    known: dict[str, bool] = {text: _unfit(text) for text in set(texts)}
    _raise(sources, np.array([known[text] for text in texts]), lambda source, label: _place_unfit(label))
    found = set(texts)
    rows = sum(len(source.labels) for source in sources)
    if len(found) < 2:
        raise InputError(
            sources[0].place(0), f"all {rows} train rows have the label {shown(found.pop())}", "two or more classes are needed"
        )
    if len(found) > 20 and 2 * len(found) > rows:
        values = tasks_with(lambda row: row.regression)
        advice = f"set data.columns.label to the column of the class labels (to predict numbers, set task: {values})"
        raise InputError(sources[0].place(0), f"{len(found)} different labels in {rows} train rows", remedy=advice)
    whole = all(_is_whole(name) for name in found)
    generic = all(re.fullmatch(r"LABEL_\d{1,9}", name) for name in found)  # of a model without names: LABEL_2 comes before LABEL_10
    number = int if whole else (lambda name: int(name.removeprefix("LABEL_"))) if generic else (lambda name: 0)
    return tuple(sorted(found, key=lambda name: (number(name), name)))


def own_names(sources: Sequence[Labelled]) -> tuple[str, ...]:
    """Returns the class names by id as files give them; () if none does."""
    return merged([source.label_names for source in sources if source.label_names])


def matched_by_place(sources: Sequence[Labelled], names: tuple[str, ...]) -> str:
    """Describes the classes of a split that match the model's only by their place; empty if their names are the same."""
    return next((words for source in sources if source.label_names and (words := by_place(source.label_names, names))), "")


def class_ids(sources: Sequence[Labelled], names: tuple[str, ...], origin: str, *, numbered: bool) -> np.ndarray:
    """Returns the class id of every row, int64 [n].

    Args:
        sources: The files of the split.
        names: Class names by id.
        origin: Where the names come from, for the message.
        numbered: Whether the names come with ids of their own, as the names of a model do.

    Raises:
        InputError: A label is not among the names; the message lists the first few with file and line.
    """
    ids: list[int] = []
    for source in sources:
        id_of = _ids(source, names, origin, numbered)
        ids += [id_of(label) for label in source.labels]
    found = np.array(ids, dtype=np.int64)
    if (found < 0).any():
        allowed = listed(names)

        def problem(source: Labelled, label: object) -> tuple[str, str]:
            given = text_of(label)
            if _unfit(given):
                return _place_unfit(label)
            return f"label {shown(given)}", f"allowed by {origin}: {allowed}{nearest(given, names)}"

        _raise(sources, found < 0, problem)
    return found


def values(sources: Sequence[Labelled]) -> np.ndarray:
    """Returns the value of every row, float32 [n].

    Raises:
        InputError: A label is not a finite number; the message lists the first few with file and line.
    """
    found = np.array([_number(label) for source in sources for label in source.labels], dtype=np.float64)
    _raise(sources, ~np.isfinite(found), lambda source, label: (f"label {shown(label)}", "a finite number is allowed"))
    return found.astype(np.float32)


def _number(label: Any) -> float:
    if isinstance(label, bool) or (isinstance(label, str) and "_" in label):  # float() would accept True and "1_000"
        return math.nan
    try:
        value = float(label)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if abs(value) <= LARGEST else math.nan


def _ids(source: Labelled, names: tuple[str, ...], origin: str, numbered: bool) -> Callable[[object], int]:
    """Returns what gives the class id of a label of a source, `NONE` for one that is no class; see the top of this file."""
    own = source.label_names
    order = order_of(own, names, source.place(0) if source.labels else "data", origin) if own else [*range(len(names))]
    ids = numbered and not any(_is_whole(name.strip()) for name in names)
    by_number = {str(number): index for number, index in enumerate(order)} if own or ids else {}
    named, known = SameName(own or names), dict[str, int]()

    def by_name(text: str) -> int:
        found = named(text)
        return found if found == NONE else order[found]

    def id_of(label: object) -> int:
        text = text_of(label)
        if isinstance(label, str) and label != text and label in named.exact:
            return by_name(label)  # names that differ only in outer spaces
        if text not in known:
            known[text] = by_number[text] if own and text in by_number else by_name(text)
            if known[text] == NONE:
                known[text] = by_number.get(text, NONE)
        return known[text]

    return id_of


def _unfit(text: str) -> bool:
    """Whether the text of a label cannot name a class."""
    if not text or len(text) > LONGEST_LABEL or text.casefold().lstrip("+-") in ("nan", "inf", "infinity"):
        return True
    return not text.isprintable() and any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _place_unfit(label: object) -> tuple[str, str]:
    """Returns what a label that names no class is, and what is allowed."""
    return f"no label ({shown(label, 40)})", f"a name of at most {LONGEST_LABEL} characters or a finite number is allowed"


def _is_minus_one(label: object) -> bool:
    if isinstance(label, list | tuple | np.ndarray):
        return len(label) > 0 and all(map(_is_minus_one, label))
    return text_of(label) in (UNLABELLED, "-1.0", "-1.000")


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()


def _raise(sources: Sequence[Labelled], wrong: np.ndarray, problem: Callable[[Labelled, object], tuple[str, str]]) -> None:
    """Raises if any row is wrong, and names the first few: a suggestion for each of a million labels would take hours."""
    rows = np.flatnonzero(wrong)
    if not len(rows):
        return
    ends = np.cumsum([len(source.labels) for source in sources])
    problems = []
    for row in rows[:SHOWN_PROBLEMS].tolist():
        number = int(np.searchsorted(ends, row, side="right"))
        source, index = sources[number], row - (int(ends[number - 1]) if number else 0)
        problems.append(Problem(source.place(index), *problem(source, source.labels[index])))
    if len(rows) > SHOWN_PROBLEMS:
        last = problems.pop()
        problems.append(replace(last, allowed=f"{last.allowed} (and {len(rows) - SHOWN_PROBLEMS} more rows like these)"))
    raise InputError.of(problems)
