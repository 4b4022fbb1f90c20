import math

import numpy as np
import pytest
from scipy.stats import poisson

from foundation.labels import candidates
from foundation.labels.classes import ClassIds
from foundation.labels.value import Numbers
from foundation.measure.agreement import compare_predictions, shortfall
from foundation.standalone.tolerance import MEDIAN_LIMIT, disagreements_allowed, judge


def test_allowed_disagreements_are_what_chance_makes_of_one_in_a_thousand() -> None:
    for n in (1, 64, 872, 2693, 10_000):
        allowed = disagreements_allowed(n)
        chances = [math.exp(-n / 1000) * (n / 1000) ** k / math.factorial(k) for k in range(allowed + 1)]
        assert sum(chances) >= 0.999
        assert allowed == 1 or sum(chances[:-1]) < 0.999
    assert [disagreements_allowed(n) for n in (1, 872, 2693)] == [1, 5, 9]


def test_predictions_may_flip_about_once_in_a_thousand_rows() -> None:
    reference = np.tile(np.float32([[0.0, 0.001]]), (2500, 1))
    for flips, passed in ((0, True), (9, True), (10, False)):
        logits = reference.copy()
        logits[:flips] = logits[:flips, ::-1]
        found = compare_predictions("text-classification", reference, logits, ClassIds(np.zeros(2500, np.int64)))
        assert (found["disagreements"], found["limit"], found["n"], found["passed"]) == (flips, 9, 2500, passed)


def test_the_median_is_gated_and_the_maximum_is_not() -> None:
    reference, labels = np.float32([[0.0, 5.0]] * 9), ClassIds(np.zeros(9, np.int64))
    one_off, all_off = reference.copy(), reference + np.float32(1.1 * MEDIAN_LIMIT)
    one_off[4, 0] += 3
    found = compare_predictions("text-classification", reference, one_off, labels)
    assert (found["passed"], found["max_abs"], found["median_abs"]) == (True, 3.0, 0.0)
    found = compare_predictions("text-classification", reference, all_off, labels)
    assert not found["passed"]
    wanted = "0 of 9 predictions differ from torch (at most 1), median |dlogit| 0.0220 (at most 0.02)"
    assert shortfall(found, "torch") == wanted
    assert shortfall({**found, "passed": True}, "torch") is None


def test_regression_is_measured_in_deviations_of_the_labels() -> None:
    labels = Numbers(np.float32([0, 50, 100, 150]))
    reference = np.float32([[1.0], [49.0], [99.0], [140.0]])
    found = compare_predictions("text-regression", reference, reference + np.float32(0.5), labels)
    assert found["median_abs"] == pytest.approx(0.5 / labels.array.std(), rel=1e-4)
    assert found["passed"]
    assert not compare_predictions("text-regression", reference, reference + 5, labels)["passed"]


def test_the_limit_is_the_quantile_of_scipy() -> None:
    counts = [0, 1, 3, 999, 1_000, 45_000, 10**6, 3 * 10**7]
    assert [disagreements_allowed(n) for n in counts] == [max(1, int(poisson.ppf(0.999, n / 1000))) if n else 1 for n in counts]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_difference_that_is_not_finite_fails(bad: float) -> None:
    distance = np.zeros((100, 3))
    distance[7, 1] = bad
    assert not judge(np.zeros(100, bool), distance)["passed"]


def test_only_regression_has_a_unit() -> None:
    labels = np.float32([0, 50, 100, 150])
    assert Numbers(labels).unit(7 * labels) == pytest.approx(labels.std())
    assert Numbers(np.ones(3, np.float32)).unit(labels) == ClassIds(labels).unit(labels) == 1.0
    ordered = candidates.labels_of([0, 0, 1], [1, 0, 2], [[1], [2]])
    assert ordered.unit(labels[:3, None]) == pytest.approx(labels[:3].std())
