"""Comparisons of the logits that are kept of windows, against the whole distributions."""

from __future__ import annotations

import numpy as np
import pytest

from foundation.labels import spans
from foundation.labels.spans import NEAR_TIE, SpanAnswer, deviation
from foundation.standalone.windows import Read

COUNT, LENGTH, PADDED = 30, 40, 48
CHARACTERS = np.array([(2 * place, 2 * place + 1) for place in range(30)])
READ = Read(0, 9, CHARACTERS, LENGTH)
CONTEXT = " ".join("abcdefghijklmnopqrstuvwxyzabcd")


def logits(seed: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=spread, size=(COUNT, PADDED, 2)).astype(np.float32)


def kept(values: np.ndarray, threshold: float | None = None) -> np.ndarray:
    return np.stack([spans.compress_logits(row, READ, CONTEXT, threshold) for row in values])


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64) - values.max())
    return powers / powers.sum()


@pytest.mark.parametrize("moved", [0.01, 0.3, 1.0])
def test_the_distance_is_the_divergence_with_all_other_tokens_as_one(moved: float) -> None:
    before = logits(0)
    after = before + np.float32(moved) * logits(1)
    found = SpanAnswer().distances(kept(before), kept(after))
    for row in range(COUNT):
        sides, whole = [], []
        for side in range(2):
            p, q = (softmax(values[row, :LENGTH, side]) for values in (before, after))
            best = [{*sorted(range(9, 39), key=lambda place, v=values: -v[row, place, side])[:20]} for values in (before, after)]
            own = [0, *sorted(best[0] & best[1])]
            sides.append(divergence(np.array([*p[own], 1 - p[own].sum()]), np.array([*q[own], 1 - q[own].sum()])))
            whole.append(divergence(p, q))
        assert found[row] == pytest.approx(np.mean(sides), rel=5e-3, abs=1e-5)  # shares below 1e-6 count as 1e-6
        assert found[row] <= np.mean(whole) + 1e-5  # tokens that count as one hide what moves among them, and nothing else


def test_differences_are_of_the_same_tokens() -> None:
    before = logits(0)
    changed, apart = SpanAnswer().differences(kept(before), kept(before + np.float32(0.25)))
    assert not changed.any()
    assert apart == pytest.approx(np.full(COUNT * 2 * 21, 0.25), abs=1e-5)
    after = before.copy()
    after[3, 20] += 100.0
    changed, _ = SpanAnswer().differences(kept(before), kept(after))
    assert np.flatnonzero(changed).tolist() == [3]


def test_disagreement_is_1_less_the_f1_of_both_answers() -> None:
    before = np.zeros((2, PADDED, 2), np.float32)
    before[:, 10, 0] = before[:, 11, 1] = 9.0
    after = before.copy()
    after[1, 12, 1] = 10.0  # "b c d" in place of "b c"
    assert SpanAnswer().disagreement(kept(before), kept(after)) == pytest.approx((0 + 1 - 2 * 2 / (2 + 3)) / 2)
    after[1, 0] = 50.0
    assert SpanAnswer().disagreement(kept(before), kept(after, 0.0)) == pytest.approx(0.5)  # no answer


@pytest.mark.parametrize(("behind", "counts"), [(0.5, False), (2.0, True)])
def test_another_span_counts_where_it_is_clearly_worse(behind: float, counts: bool) -> None:
    before = logits(3, 0.5)
    before[:, 10, 0] = before[:, 12, 1] = 6.0
    limit = NEAR_TIE * deviation(kept(before))
    before[:, 14, 1] = 6.0 - behind * limit  # the second best span ends later
    after = before.copy()
    after[5, 14, 1] = 6.0 + 0.01
    changed, _ = SpanAnswer().differences(kept(before), kept(after))
    assert np.flatnonzero(changed).tolist() == ([5] if counts else [])


def test_no_answer_in_place_of_one_always_counts() -> None:
    before = np.zeros((1, PADDED, 2), np.float32)
    before[:, 10, 0] = before[:, 11, 1] = 9.0
    after = before.copy()
    after[0, 0] = 9.0
    after[0, 0, 0] += 0.001
    changed, _ = SpanAnswer().differences(kept(before, 0.0), kept(after, 0.0))
    assert changed.tolist() == [True]


def test_a_span_of_tokens_that_the_reference_does_not_keep_counts() -> None:
    before = logits(4)
    after = before.copy()
    lowest = 9 + int(np.argmin(before[2, 9:39, 0]))
    after[2, lowest] = 50.0
    changed, _ = SpanAnswer().differences(kept(before), kept(after))
    assert changed[2]
