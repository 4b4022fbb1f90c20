"""Which rows of a split belong together, because they share a text, an image or a document.

What is true of one of them is likelier of the others: two questions about one context are easy or hard alike. Intervals therefore draw
groups (`foundation.core.resampling`), and rows for selection are set aside in whole groups (`foundation.data.splits`).

    questions                      their context
    candidates, images, queries    one value each already: a query with its candidates, an image with its captions
    texts, images, sounds          rows of equal content
    sentences with tagged words    their document, where -DOCSTART- lines divide a file
    source and target              the source
    pairs of texts, triplets       the side that repeats most often, such as the premise of several hypotheses. A side with fewer than 30
                                   different texts is a category, such as the topic of a comment, and groups nothing
    blocks of a text               their document; of fewer than 30 documents runs of about n^(1/3) neighbouring blocks (Hall, Horowitz and
                                   Jing 1995: the length for the variance of a mean of n dependent values)

Not known, and so not grouped: speakers of sounds, authors of texts, near duplicates.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foundation.core.resampling import FEW
from foundation.standalone.preprocess import TokenPair
from foundation.standalone.windows import Window

if TYPE_CHECKING:
    from foundation.data.splits import Split

Numbers = NDArray[np.int64]


def groups_of_values(split: Split) -> Numbers:
    """Returns the number of the group of each value that metrics of a split are means over (`Labels.values`), int64 `[m]`."""
    units = split.labels.rows_of_values()
    if split.documents is not None:
        return _numbered(_in_runs(split) if _are_blocks(split.rows) else split.documents[units[:, 0]].tolist())
    return groups_of_rows([split.labels.grouped_by(_content(split.rows, unit)) for unit in units.tolist()])


def groups_of_split(split: Split) -> Numbers:
    """Returns the number of the group of each row of a split, int64 `[n]`; the texts of a pair or triplet have its group."""
    if split.documents is not None:
        return _numbered(_in_runs(split) if _are_blocks(split.rows) else split.documents.tolist())
    units = split.labels.rows_of_values()
    if len(split) == 0 or units.shape[1] == 1:
        return groups_of_rows(split.rows)
    keys: list[Hashable] = [("alone", row) for row in range(len(split))]
    for unit, group in zip(units.tolist(), groups_of_values(split).tolist(), strict=True):
        for row in unit:
            keys[row] = group
    return _numbered(keys)


def groups_of_rows(rows: Sequence[Any]) -> Numbers:
    """Returns the number of the group of each row, int64 `[n]`, of texts, pairs of texts, files, pairs of tokens or windows."""
    if rows and all(isinstance(row, tuple) and not isinstance(row, TokenPair) for row in rows):
        return _numbered(_side(rows))
    return _numbered([_key(row) for row in rows])


def _content(rows: Sequence[Any], unit: Sequence[int]) -> Any:
    """Returns the row that stands for a value: its only one, or a pair of the first two."""
    return rows[unit[0]] if len(unit) == 1 else (rows[unit[0]], rows[unit[1]])


def _key(row: Any) -> Hashable:
    if isinstance(row, Window):
        return row.context
    if isinstance(row, TokenPair):
        return row.source.tobytes()
    return row.tobytes() if isinstance(row, np.ndarray) else row


def _side(pairs: Sequence[Any]) -> list[Hashable]:
    """Returns the text of each pair that it shares with most others; of a pair in which that is empty the other text."""
    sides = [[pair[place] for pair in pairs] for place in (0, 1)]
    counts = [len(set(side)) for side in sides]
    fewer = int(counts[1] < counts[0])
    shared = fewer if counts[fewer] >= FEW else 1 - fewer
    return [text if text != "" else other for text, other in zip(sides[shared], sides[1 - shared], strict=True)]


def _are_blocks(rows: Sequence[Any]) -> bool:
    return bool(rows) and isinstance(rows[0], np.ndarray)


def _in_runs(split: Split) -> list[Hashable]:
    """Returns the group of each block: its document, or where documents are few the run of neighbours that it is in."""
    assert split.documents is not None, "blocks have documents"
    if len(np.unique(split.documents)) >= FEW:
        return list(split.documents.tolist())
    length = round(len(split) ** (1 / 3)) if len(split) >= FEW else 1  # runs of so few would be too few to draw
    return list((np.arange(len(split)) // length).tolist())


def _numbered(keys: Sequence[Hashable]) -> Numbers:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
