"""Selective prediction: against pairs and orders that are written out, and by its properties."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.measure.selective import aurc, auroc, risks

ROWS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0, np.nan, np.inf]), st.booleans()), min_size=1, max_size=12)


def split(rows: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([score for score, _ in rows]), np.array([wrong for _, wrong in rows])


@given(ROWS)
def test_auroc_counts_the_pairs(rows: list[tuple[float, bool]]) -> None:
    scores, wrong = split([(-np.inf if np.isnan(score) else score, bad) for score, bad in rows])
    pairs = [(good > bad) + 0.5 * (good == bad) for good in scores[~wrong] for bad in scores[wrong]]
    assert auroc(*split(rows)) == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


@given(ROWS.filter(lambda rows: len(rows) <= 5))
def test_risk_is_the_mean_over_all_orders_that_the_scores_allow(rows: list[tuple[float, bool]]) -> None:
    known = [(-np.inf if np.isnan(score) else score, bad) for score, bad in rows]
    allowed = [order for order in permutations(known) if all(a[0] >= b[0] for a, b in pairwise(order))]
    expected = [np.mean([sum(bad for _, bad in order[: count + 1]) / (count + 1) for order in allowed]) for count in range(len(rows))]
    assert risks(*split(rows)).tolist() == pytest.approx(expected)
    assert aurc(*split(rows)) == pytest.approx(np.mean(expected))


@given(ROWS, st.randoms(use_true_random=False))
def test_neither_depends_on_the_order_of_rows(rows: list[tuple[float, bool]], random: np.random.Generator) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert aurc(*split(shuffled)) == pytest.approx(aurc(*split(rows)))
    assert auroc(*split(shuffled)) == auroc(*split(rows))


def test_the_best_and_the_worst_order() -> None:
    wrong = np.array([True, False, False, False])
    assert (auroc(np.array([0.0, 1, 2, 3]), wrong), aurc(np.array([0.0, 1, 2, 3]), wrong)) == (1.0, pytest.approx(1 / 16))
    assert (auroc(np.array([9.0, 1, 2, 3]), wrong), aurc(np.array([9.0, 1, 2, 3]), wrong)) == (
        0.0,
        pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4),
    )
