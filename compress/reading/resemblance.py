"""Checks whether selection rows resemble evaluation rows: choices made on different rows may not transfer.

Without a selection split, selection rows are train rows. If these differ from the test split (phrases against whole sentences, as in
SST-2), a small model can win on them and lose on the test split. Lengths show such a difference without labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from foundation.data.splits import Data
from foundation.standalone.preprocess import Row

RATIO = 1.5
"""Medians that are further apart than this are reported."""
FEWEST = 20
"""Splits with fewer rows are not compared."""


def warn_if_lengths_differ(data: Data) -> str | None:
    """Returns a warning if the median length of the selection rows is far from the median length of the evaluation rows; None if it is
    near, or if the rows are not texts."""
    selection, evaluation = _lengths(data.selection.rows), _lengths((data.hidden or data.evaluation).rows)
    if min(len(selection), len(evaluation)) < FEWEST:
        return None
    ours, theirs = median(selection), median(evaluation)
    if max(ours, theirs) <= RATIO * max(1.0, min(ours, theirs)):
        return None
    return (
        f"data: the median selection row has {ours:g} characters, the median evaluation row {theirs:g}: what is chosen on the former may "
        "not hold for the latter; give data.files.validation with rows like the test split's"
    )


def _lengths(rows: Sequence[Row]) -> list[int]:
    """Returns the number of characters of each text; a pair counts as both of its texts."""
    return [sum(map(len, row)) if isinstance(row, tuple) else len(row) for row in rows if _is_text(row)]


def _is_text(row: Row) -> bool:
    return isinstance(row, str) or (isinstance(row, tuple) and all(isinstance(part, str) for part in row))
