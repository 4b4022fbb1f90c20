"""Sets of labels: the metrics against scikit-learn, thresholds against a search through all of them."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compress.report import intervals
from foundation.labels import label_sets
from foundation.measure.metrics import metrics

TASK = "multi-label-classification"
SHAPES = st.tuples(st.integers(1, 30), st.integers(2, 5))  # a single column is no set to scikit-learn


@given(SHAPES, st.integers(0, 10**6), st.floats(0, 1))
def test_figures_agree_with_sklearn(shape: tuple[int, int], seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    logits, true = random.normal(size=shape).astype(np.float32), random.random(shape) < share
    found = metrics(TASK, logits, label_sets.LabelSets(true))
    expected = {
        "micro_f1": sklearn.metrics.f1_score(true, logits > 0, average="micro", zero_division=1),
        "macro_f1": sklearn.metrics.f1_score(true, logits > 0, average="macro", zero_division=0),
        "exact_match": sklearn.metrics.accuracy_score(true, logits > 0),
    }
    assert found == pytest.approx(expected)


def test_no_label_found_where_there_is_none_is_right() -> None:
    nothing = np.zeros((4, 3), bool)
    assert label_sets.micro_f1(nothing, nothing) == label_sets.exact_match(nothing, nothing) == 1.0
    assert label_sets.micro_f1(nothing, ~nothing) == 0.0


@given(hnp.arrays(np.float32, st.integers(2, 25), elements=st.integers(-4, 4).map(float)), st.integers(0, 10**6))
def test_no_threshold_is_better_than_the_best(scores: np.ndarray, seed: int) -> None:
    """Scores come in few values, so that many are equal."""
    true = np.random.default_rng(seed).random((len(scores), 1)) < 0.4
    logits = scores[:, None]
    [chosen] = label_sets.best_thresholds(logits, true, 1)
    if true.all() or not true.any():
        assert chosen == 0
        return
    tried = {float(cut): label_sets.each_f1(logits > cut, true)[0] for cut in (*np.unique(scores) + 0.5, *np.unique(scores) - 0.5, 0.0)}
    assert label_sets.each_f1(logits > chosen, true)[0] == pytest.approx(max(tried.values()))
    if tried[0.0] == max(tried.values()):
        assert chosen == 0


def test_a_label_of_few_rows_keeps_0() -> None:
    logits = np.linspace(-3, -1, 40, dtype=np.float32)[:, None]
    true = logits > -1.5
    assert label_sets.best_thresholds(logits, true, int(true.sum()))[0] < -1
    assert label_sets.best_thresholds(logits, true, int(true.sum()) + 1)[0] == 0


def test_intervals_are_of_whole_rows() -> None:
    random = np.random.default_rng(0)
    labels, before = label_sets.LabelSets(random.random((60, 3)) < 0.4), random.normal(size=(60, 3)).astype(np.float32)
    from foundation.measure.metrics import METRICS

    single = intervals.single(METRICS["micro_f1"], before, labels)
    assert single.n == 60
    assert single.low < single.value < single.high
    same = intervals.paired(METRICS["micro_f1"], before, before, labels)
    assert (same.difference, same.low, same.high) == (0, 0, 0)
