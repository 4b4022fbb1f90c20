"""Converts cells that name any number of labels to sets of class ids.

A cell is a list of labels, or a vector with a 0 or 1 for each label (multi-hot), as json, jsonl, parquet and the Hub have them; or a text
with the same separated by commas, with or without brackets around. An empty list or text says that no label holds. What a single label
means is said in `compress.reading.labels`.

Which of both cells are is seen from all of them, unless `data.multi_hot` says it:

    0 and 1 alone, and some cell repeats one      vectors, which all have to be as long as there are labels
    0 and 1 alone, each cell as long as that      vectors if the numbers are floats or booleans, else both is possible and an error
    everything else                               lists; a number given twice in one is an error
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compress.reading import labels
from compress.reading.labels import Labelled
from foundation.core.errors import InputError
from foundation.core.shown import shown

BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
KEY = "data.multi_hot"
Verdict = Literal["vectors", "lists", "either", "empty"]
_QUOTED = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)")\s*(,|$)""")
_NUMBERS = re.compile(r"[\d.\s]+")


@dataclass(frozen=True)
class _Members:
    """All labels of a source, one after the other."""

    source: Labelled
    labels: list[object]
    rows: list[int]
    """The row of each label."""

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.source.label_names

    def place(self, index: int) -> str:
        return self.source.place(self.rows[index])


def are_vectors(sources: Sequence[Labelled], count: int | None, setting: bool | None) -> bool:
    """Returns whether the cells are vectors with a 0 or 1 for each label, rather than lists of labels.

    Args:
        sources: The files of all splits.
        count: Number of labels; None if only the data determine it.
        setting: What the recipe says; None: nothing.

    Raises:
        InputError: Both are possible, or neither; a line names file and line.
    """
    if setting is not None:
        return setting
    found = [_verdict(source, count) for source in sources]
    if "vectors" in found and "lists" in found:
        one, other = (sources[found.index(verdict)] for verdict in ("vectors", "lists"))
        both = f"labels {shown(other.labels[0], 40)} are a list of labels, {one.place(0)} has a vector of 0 and 1"
        raise InputError(other.place(0), both, remedy=f"give one of both everywhere, or set {KEY}")
    if "either" not in found or "vectors" in found or "lists" in found:
        return "vectors" in found
    source = sources[found.index("either")]
    row = next(row for row in range(len(source.labels)) if len(_split(source.labels[row], source, row)))
    raise InputError(
        source.place(row),
        f"labels {shown(source.labels[row], 40)} are two labels, or a vector with 0 or 1 for each of two labels",
        remedy=f"set {KEY}: true for vectors, false for lists of labels",
    )


def _verdict(source: Labelled, count: int | None) -> Verdict:
    """Returns the form of a source's cells; raises if they look like vectors but are not."""
    cells = [_split(cell, source, row) for row, cell in enumerate(source.labels)]
    bits = [[_bit(member) for member in cell] for cell in cells]
    if not any(cells):
        return "empty"
    if not set(source.label_names) <= {"0", "1"} or any(bit is None for cell in bits for bit in cell):
        _check_lists(cells, source)
        return "lists"
    lengths = {len(cell) for cell in cells}
    if any(len(set(cell)) < len(cell) for cell in bits):
        wanted = count if count is not None else max(lengths)
        _check_vectors(cells, source, wanted, "" if count is None else f", and the model has {count} labels")
        return "vectors"
    if lengths != {count if count is not None else 2}:
        return "lists"
    return "vectors" if any(isinstance(member, float | bool) or "." in str(member) for cell in cells for member in cell) else "either"


def _check_lists(cells: Sequence[Sequence[object]], source: Labelled) -> None:
    """Checks that no cell is a vector of other numbers than 0 and 1: a list names each label once."""
    for row, cell in enumerate(cells):
        numbers = [text for member in cell if (text := labels.text_of(member)).lstrip("-").isdigit()]
        soft = next((member for member in cell if isinstance(member, float) and not member.is_integer() and member == member), None)
        if len(set(numbers)) == len(numbers) and soft is None:
            continue
        what = f"{soft!r} is no label" if soft is not None else "a number is given twice"
        allowed = f"a list of labels, or a vector with 0 or 1 for each label, is allowed ({KEY} says which)"
        raise InputError(source.place(row), f"labels {shown(source.labels[row], 40)}: {what}", allowed)


def _check_vectors(cells: Sequence[Sequence[object]], source: Labelled, count: int, why: str) -> None:
    for row, cell in enumerate(cells):
        if len(cell) != count or any(_bit(member) is None for member in cell):
            has = f"{len(cell)} numbers{why}" if len(cell) != count else "others than 0 and 1"
            needed = f"a vector with 0 or 1 for each of {count} labels is needed, or {KEY}: false for lists of labels"
            raise InputError(source.place(row), f"labels {shown(source.labels[row], 40)} have {has}", needed)


def _bit(member: object) -> int | None:
    """Returns 0 or 1; None for everything else."""
    if isinstance(member, bool | int | float | np.bool_):
        return int(member) if member in (0, 1) else None
    return BITS.get(member) if isinstance(member, str) else None


def set_names(sources: Sequence[Labelled], *, vectors: bool = False) -> tuple[str, ...]:
    """Returns the names of all labels of a train split, ordered by id; the labels of vectors are LABEL_0, LABEL_1, ..., as in Transformers.

    Raises:
        InputError: See `compress.reading.labels.class_names`; or a cell is neither a list nor a text.
    """
    if not vectors:
        return labels.class_names(_members(sources))
    lengths = {len(_split(cell, source, row)) for source in sources for row, cell in enumerate(source.labels)}
    return tuple(f"LABEL_{index}" for index in range(max(lengths, default=0)))


def set_ids(sources: Sequence[Labelled], names: tuple[str, ...], origin: str, *, numbered: bool, vectors: bool = False) -> np.ndarray:
    """Returns which labels hold for every row, bool [n, C].

    Args:
        sources: The files of the split.
        names: Names of the labels by id.
        origin: Where the names come from, for the message.
        numbered: Whether the names come with ids of their own, as the names of a model do.
        vectors: Whether cells are vectors with 0 or 1 for each label.

    Raises:
        InputError: A label is not among the names, a vector has another length, or a cell is neither a list nor a text; the message gives
            file and line.
    """
    if vectors:
        return _of_vectors(sources, len(names), origin)
    members = _members(sources)
    ids = labels.class_ids(members, names, origin, numbered=numbered)
    sizes = [len(source.labels) for source in sources]
    starts = np.cumsum([0, *sizes[:-1]])
    rows = np.concatenate([start + np.array(each.rows, np.int64) for start, each in zip(starts, members, strict=True)])
    found = np.zeros((sum(sizes), len(names)), bool)
    found[rows, ids] = True
    return found


def _of_vectors(sources: Sequence[Labelled], count: int, origin: str) -> np.ndarray:
    cells = [[_split(cell, source, row) for row, cell in enumerate(source.labels)] for source in sources]
    for source, own in zip(sources, cells, strict=True):
        _check_vectors(own, source, count, f", and {origin} has {count} labels")
    return np.array([[bool(_bit(member)) for member in cell] for own in cells for cell in own], bool).reshape(-1, count)


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


def _split(cell: object, source: Labelled, row: int) -> list[object]:
    if isinstance(cell, list | tuple | np.ndarray):
        return list(cell)
    if isinstance(cell, str):
        return _of_text(cell.strip())
    if isinstance(cell, int) and not isinstance(cell, bool):  # a column in which every row happens to have one label
        return [cell]
    raise InputError(source.place(row), f"labels {shown(cell, 40)}", "a list of labels, or a text with commas between them, is allowed")


def _of_text(text: str) -> list[object]:
    """Returns the entries of a list in a text: between commas, or as Python, JSON and numpy print lists."""
    if not (text.startswith("[") and text.endswith("]")):
        return [part.strip() for part in text.split(",")] if text else []
    inner = text[1:-1].strip()
    if _NUMBERS.fullmatch(inner):  # numpy prints no commas
        return [f"{float(part):g}" if part.endswith(".") else part for part in inner.split()]
    if inner[:1] not in ("'", '"'):
        return [part.strip() for part in inner.split(",")] if inner else []
    found, place = list[object](), 0
    while place < len(inner):
        match = _QUOTED.match(inner, place)
        if match is None:
            return [part.strip() for part in text.split(",")]
        found.append(match[1] if match[2] is None else match[2])
        place = match.end()
    return found
