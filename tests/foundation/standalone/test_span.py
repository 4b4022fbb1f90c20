"""Answers to questions, as a served model returns them, against every span written out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from foundation.standalone.response import RESPONSES, answer, best_spans
from foundation.standalone.windows import Question, Read

N_BEST, LONGEST = 20, 30
RANDOM = np.random.default_rng(0)
CONTEXT = "aa bb cc dd ee ff gg hh ii jj"
CHARACTERS = np.array([(3 * number, 3 * number + 2) for number in range(10)])
ASKED = Question(CONTEXT, None, (), (Read(0, 4, CHARACTERS[:6], 11), Read(11, 15, CHARACTERS[4:], 11)))
"""Two windows of ten words, which share two."""


def every_span(start: list[float], end: list[float]) -> list[tuple[float, int, int]]:
    """All spans, the best first, as the docstring of the module says."""
    found = [
        (float(np.float32(start[first]) + np.float32(end[last])), first, last)
        for first in range(len(start))
        for last in range(first, min(first + LONGEST, len(start)))
    ]
    return sorted(found, key=lambda span: (-span[0], span[1], span[2]))


@pytest.mark.parametrize("length", [1, 5, 29, 30, 31, 70])
@pytest.mark.parametrize("count", [1, N_BEST])
def test_the_best_spans_are_those_of_all(length: int, count: int) -> None:
    for _ in range(5):
        start, end = RANDOM.integers(0, 6, (2, length)).astype(np.float32)  # with many equal sums
        assert best_spans(start, end, count) == every_span(start.tolist(), end.tolist())[:count]


def test_an_answer_is_the_best_span_of_all_windows_with_its_probability() -> None:
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(scale=3, size=(22, 2)).astype(np.float32)
        spans: dict[tuple[int, int], float] = {}
        for window in ASKED.windows:
            values = logits[window.first : window.first + len(window.characters)]
            for score, first, last in every_span(values[:, 0].tolist(), values[:, 1].tolist()):
                place = int(window.characters[first, 0]), int(window.characters[last, 1])
                spans[place] = max(score, spans.get(place, -math.inf))
        ranked = sorted(spans.items(), key=lambda item: -item[1])
        (start, end), score = ranked[0]
        null = min(float(logits[0].sum()), float(logits[11].sum()))
        powers = [math.exp(value) for _, value in ranked[:N_BEST]]
        found = answer(logits, ASKED)
        assert (found["text"], found["start"], found["end"]) == (CONTEXT[start:end], start, end)
        assert found["score"] == pytest.approx(score, abs=1e-5)
        assert found["null_score"] == pytest.approx(null, abs=1e-5)
        assert found["probability"] == pytest.approx(powers[0] / sum(powers), abs=1e-5)
        for threshold in (null - score - 0.1, null - score + 0.1):
            decided = answer(logits, replace(ASKED, threshold=threshold))
            none = null - score > threshold
            assert (decided["text"] == "") == none
            assert (decided["start"], decided["end"]) == ((0, 0) if none else (start, end))
            assert (decided["score"], decided["null_score"]) == (found["score"], found["null_score"])
            share = (math.exp(null) if none else powers[0]) / (sum(powers) + math.exp(null))
            assert decided["probability"] == pytest.approx(share, abs=1e-5)


def test_other_answers_and_figures_are_told_apart() -> None:
    form = RESPONSES["span"]
    logits = RANDOM.normal(size=(2, 22, 2)).astype(np.float32)
    expected = form.of(logits, ("start", "end"), [ASKED, ASKED])["ANSWER"]
    assert not form.differ(expected.copy(), expected).any()
    for key, value in (("text", "zz"), ("score", 1e-3), ("null_score", 1e-3), ("probability", 1e-3), ("start", 1)):
        got = expected.copy()
        told = json.loads(got[1, 0])
        told[key] = value if isinstance(value, str) else told[key] + value
        got[1, 0] = json.dumps(told).encode()
        assert form.differ(got, expected).tolist() == [False, True], key
    with pytest.raises(ValueError, match=r"shape \(2, 22, 2\) for 1 texts; \[n, tokens, 2\]"):
        form.of(logits, ("start", "end"), [ASKED])
