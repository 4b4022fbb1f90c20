"""Runs: rows that follow each other and are learned together, such as the texts of a pair or the candidates of a query. Uses only numpy.

Runs are given by their sizes, int64 `[r]`: the rows of each. Their sum is the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foundation.core.arrays import Array


def equal(num_rows: int, size: int) -> Array:
    """Returns the sizes of runs of `size` rows each, int64 `[num_rows / size]`."""
    assert num_rows % size == 0, (num_rows, size)
    return np.full(num_rows // size, size, np.int64)


def sizes_of(numbers: Array) -> Array:
    """Returns the sizes of the runs of equal numbers, int64 `[r]`, of numbers `[n]`."""
    starts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1 if len(numbers) else np.zeros(0, np.int64)
    return np.diff([0, *starts, len(numbers)]).astype(np.int64) if len(numbers) else starts


def rows_of(sizes: Array, chosen: Sequence[int] | Array) -> Array:
    """Returns the rows of some runs, one run after the other in the order they are given, int64 `[n]`.

    Args:
        sizes: Rows of each run, int64 `[r]`.
        chosen: Numbers of runs.
    """
    starts = np.cumsum(sizes) - sizes
    parts = [np.arange(starts[run], starts[run] + sizes[run]) for run in chosen]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
