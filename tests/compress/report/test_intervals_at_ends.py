"""Intervals of shares of 0 and 1, and of figures that are 0 by convention, where the bootstrap draws the same figure every time.

python -m pytest tests/compress/report/test_intervals_at_ends.py
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from compress.report import intervals
from foundation.labels.classes import ClassIds
from foundation.labels.label_sets import LabelSets
from foundation.measure.judged import judged_of
from foundation.measure.metrics import METRICS, Metric

TASK = "text-classification"


def logits_of(answers: np.ndarray, num_classes: int = 2) -> np.ndarray:
    return np.eye(num_classes, dtype=np.float32)[answers]


def of_class(name: str) -> Metric:
    return judged_of(TASK, f"{name}:b", ("a", "b")).metric


def score_end(n: int) -> float:
    """Upper end of Wilson's interval of none of n rows, with Student's t."""
    square = stats.t.ppf(0.975, n - 1) ** 2
    return float(square / (n + square))


@pytest.mark.parametrize("metric", [METRICS["f1"], of_class("f1")])
def test_f1_of_a_class_that_is_never_predicted(metric: Metric) -> None:
    labels = np.arange(400) < 20
    found = intervals.single(metric, logits_of(np.zeros(400, int)), ClassIds(labels.astype(int)))
    share = score_end(20)
    assert (found.value, found.low) == (0, 0)
    assert found.high == pytest.approx(2 * share / (1 + share))
    assert found.high == pytest.approx(0.3, abs=0.01)
    assert 0.01 < (1 - share) ** 20 < 0.05  # a model with this share of its 20 rows right would seldom have none


def test_false_alarms_count_too() -> None:
    labels = (np.arange(400) < 20).astype(int)
    found = intervals.single(METRICS["f1"], logits_of((np.arange(400) >= 360).astype(int)), ClassIds(labels))
    share = score_end(60)
    assert found.high == pytest.approx(2 * share / (1 + share))


def test_a_perfect_f1_is_no_proof() -> None:
    labels = (np.arange(400) < 20).astype(int)
    found = intervals.single(METRICS["f1"], logits_of(labels), ClassIds(labels))
    share = 1 - score_end(20)
    assert (found.value, found.high) == (1, 1)
    assert found.low == pytest.approx(2 * share / (1 + share))


@pytest.mark.parametrize(("name", "rows"), [("recall", 20), ("precision", 40)])
def test_figures_of_a_class_count_their_own_rows(name: str, rows: int) -> None:
    labels = (np.arange(400) < 20).astype(int)
    found = intervals.single(of_class(name), logits_of((np.arange(400) >= 360).astype(int)), ClassIds(labels))
    assert (found.low, found.high) == (0, pytest.approx(score_end(rows)))


def test_rows_that_belong_together_count_once() -> None:
    labels, groups = (np.arange(400) < 20).astype(int), np.arange(400) // 2
    found = intervals.single(METRICS["f1"], logits_of(np.zeros(400, int)), ClassIds(labels), groups=groups)
    share = score_end(10)
    assert found.high == pytest.approx(2 * share / (1 + share))


def test_sets_count_rows_that_have_a_label_or_get_one() -> None:
    true = np.zeros((200, 3), bool)
    true[:10, 1] = True
    found = intervals.single(METRICS["micro_f1"], np.full((200, 3), -1.0, np.float32), LabelSets(true))
    share = score_end(10)
    assert found.high == pytest.approx(2 * share / (1 + share))


@pytest.mark.parametrize("name", ["f1", "recall", "precision"])
def test_a_class_that_no_row_has_leaves_its_figures_undefined(name: str) -> None:
    found = intervals.single(of_class(name), logits_of(np.zeros(100, int)), ClassIds(np.zeros(100, int)))
    assert (found.value, found.low, found.high, found.interval_reason) == (0, None, None, intervals.NO_ROW)


def test_a_correlation_of_answers_that_are_alike_is_undefined() -> None:
    labels = np.arange(100) % 2
    found = intervals.single(METRICS["matthews"], logits_of(np.zeros(100, int)), ClassIds(labels))
    assert (found.value, found.low, found.high, found.interval_reason) == (0, None, None, intervals.ALIKE)


def test_other_shares_keep_the_bootstrap() -> None:
    labels = np.arange(200) % 2
    answers = np.where(np.arange(200) < 190, labels, 1 - labels)
    found = intervals.single(METRICS["f1"], logits_of(answers), ClassIds(labels))
    drawn = intervals.bootstrap(METRICS["f1"].of, logits_of(answers), labels, bounds="share")
    assert (found.low, found.high) == drawn


def test_macro_f1_of_three_classes_counts_all_rows() -> None:
    labels = np.arange(90) % 3
    found = intervals.single(METRICS["f1"], logits_of((labels + 1) % 3, 3), ClassIds(labels))
    assert (found.low, found.high) == (0, pytest.approx(score_end(90)))
