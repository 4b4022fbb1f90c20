"""Runs of rows that are learned together: found, and taken whole."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foundation.core.runs import equal, rows_of, sizes_of


@given(st.lists(st.integers(0, 2), max_size=12))
def test_sizes_are_those_of_neighbours_that_are_equal(numbers: list[int]) -> None:
    assert sizes_of(np.array(numbers, np.float32)).tolist() == [len(list(group)) for _, group in groupby(numbers)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_rows_of_runs_are_taken_whole_and_in_the_order_given(sizes: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes)))))
    expected = [row for run in chosen for row in range(sum(sizes[:run]), sum(sizes[: run + 1]))]
    assert rows_of(np.array(sizes), chosen).tolist() == expected


def test_runs_of_one_size() -> None:
    assert equal(6, 3).tolist() == [3, 3]
    assert equal(0, 2).tolist() == []
