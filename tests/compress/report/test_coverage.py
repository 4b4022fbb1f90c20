"""Do 95 % intervals hold the true figure 95 times of 100? Rows with a common cause are drawn from a population whose figure is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from compress.report import intervals
from foundation.labels.classes import ClassIds
from foundation.labels.label_sets import LabelSets
from foundation.labels.next_token import NO_CHOICE, Tokens
from foundation.labels.value import Numbers
from foundation.measure.metrics import METRICS

pytestmark = pytest.mark.whole

Draw = Callable[[np.random.Generator, int], "Drawn"]
MANY, FEW = 60, 12


class Drawn(NamedTuple):
    """Values of two models on the same rows, as metrics read them."""

    before: np.ndarray
    after: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


def latent(draw: np.random.Generator, groups: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the group of each row, how easy it is, and how much easier the first model finds it: half of both is the group's."""
    numbers = np.repeat(np.arange(groups), draw.integers(1, most + 1, groups))
    one, other = ((draw.normal(size=groups)[numbers] + draw.normal(size=len(numbers))) / np.sqrt(2) for _ in range(2))
    return numbers, one, 0.25 + 0.5 * other


def shares(most: int, column: int, width: int) -> Draw:
    """Rows with a figure in 0..1 in one column, many of them 0 or 1: F1 of answers, NDCG of queries."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, ease, lead = latent(draw, groups, most)
        values = [np.zeros((len(numbers), width)) for _ in range(2)]
        for own, known in zip(values, (ease, ease - lead), strict=True):
            own[:, column] = np.clip(0.7 + 0.5 * known, 0, 1)
        return Drawn(*values, Numbers(np.zeros(len(numbers), np.float32)), numbers)

    return drawn


def counted(most: int, width: int, order: tuple[int, int, int]) -> Draw:
    """Rows with counts that a ratio is made of: entities of sentences (right, found, true), recalls of images."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, ease, lead = latent(draw, groups, most)
        true = draw.poisson(1.5, len(numbers)) + 1
        values = []
        for known in (ease, ease - lead):
            own = np.zeros((len(numbers), width))
            right = draw.binomial(true, 1 / (1 + np.exp(-1 - known)))
            own[:, order[0]], own[:, order[1]], own[:, order[2]] = right, right + draw.poisson(0.3 * np.exp(-0.3 * known)), true
            values.append(own)
        return Drawn(*values, Numbers(np.zeros(len(numbers), np.float32)), numbers)

    return drawn


def wrong_words(most: int) -> Draw:
    """Sounds with wrong words and words."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, ease, lead = latent(draw, groups, most)
        words = draw.integers(3, 20, len(numbers))
        values = [
            np.stack([draw.binomial(words, 1 / (1 + np.exp(1.5 + known))), words, words, words], axis=1) for known in (ease, ease - lead)
        ]
        return Drawn(*(value.astype(np.float64) for value in values), Numbers(np.zeros(len(numbers), np.float32)), numbers)

    return drawn


def classes(most: int) -> Draw:
    """Rows of two classes that are right or wrong."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, ease, lead = latent(draw, groups, most)
        labels = draw.integers(0, 2, len(numbers))
        answers = [np.where(known > -0.8, labels, 1 - labels) for known in (ease, ease - lead)]
        return Drawn(*(np.eye(2)[own] for own in answers), ClassIds(labels), numbers)

    return drawn


def sets(most: int) -> Draw:
    """Rows of four labels, any number of which may hold."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, ease, lead = latent(draw, groups, most)
        labels = draw.random((len(numbers), 4)) < 0.4
        sure = np.where(labels, 1.0, -1.0)
        values = [sure * (known[:, None] + 1 + draw.normal(size=labels.shape)) for known in (ease, ease - lead)]
        return Drawn(*values, LabelSets(labels), numbers)

    return drawn


def scores(most: int) -> Draw:
    """Pairs with scores, and what two models say of them."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, noise, more = latent(draw, groups, most)
        labels = draw.normal(size=len(numbers)).astype(np.float32)
        before = labels + noise
        return Drawn(before[:, None], (before + 0.3 * more)[:, None], Numbers(labels), numbers)

    return drawn


def tokens(most: int) -> Draw:
    """Blocks of four tokens, whose losses have something in common."""

    def drawn(draw: np.random.Generator, groups: int) -> Drawn:
        numbers, ease, lead = latent(draw, groups, most)
        values = []
        for known in (ease, ease - 0.2 * lead):
            own = np.full((len(numbers), 4, 2), NO_CHOICE, np.float64)
            own[..., 0] = np.exp(0.8 - 0.3 * known)[:, None] * draw.exponential(1, (len(numbers), 4))
            values.append(own)
        return Drawn(*values, Tokens(np.zeros((len(numbers), 4), np.int32)), numbers)

    return drawn


CASES: dict[str, tuple[str, Draw]] = {
    "question-answering": ("answer_f1", shares(9, 1, 3)),
    "text-classification, pairs": ("accuracy", classes(5)),
    "text-classification, f1": ("f1", classes(5)),
    "multi-label-classification": ("micro_f1", sets(3)),
    "token-classification": ("entity_f1", counted(9, 3, (0, 1, 2))),
    "text-regression": ("pearson", scores(5)),
    "sentence-embedding": ("spearman", scores(5)),
    "sentence-triplets": ("accuracy", classes(3)),
    "retrieval": ("ndcg@10", shares(1, 0, 3)),
    "reranking": ("mrr@10", shares(1, 1, 3)),
    "image-text-retrieval": ("text_to_image_recall@1", counted(1, 7, (0, 3, 6))),
    "text-generation": ("perplexity", tokens(9)),
    "text-to-text": ("perplexity", tokens(3)),
    "speech-recognition": ("wer", wrong_words(3)),
}
"""A metric of each task, with rows grouped as `foundation.data.groups` does; classes of images and sounds are as texts."""


@cache
def truth(case: str) -> tuple[float, float]:
    """The figure of the population, and what the second model loses in it."""
    name, draw = CASES[case]
    drawn, metric = draw(np.random.default_rng(99), 60_000), METRICS[name]
    before, after = (metric.of(*drawn.labels.values(values)) for values in (drawn.before, drawn.after))
    return before, metric.drop(before, after)


def coverage(case: str, groups: int, simulations: int, together: bool = True) -> tuple[float, float]:
    """Returns how often the interval of a metric, and that of its loss, hold the truth."""
    (name, draw), held = CASES[case], np.zeros(2)
    for seed in range(simulations):
        drawn = draw(np.random.default_rng([1, seed]), groups)
        given = drawn.groups if together else None
        alone = intervals.single(METRICS[name], drawn.before, drawn.labels, groups=given, seed=seed)
        both = intervals.paired(METRICS[name], drawn.before, drawn.after, drawn.labels, groups=given, seed=seed)
        held += [found.low <= true <= found.high for found, true in zip((alone, both), truth(case), strict=True)]
    return float(held[0] / simulations), float(held[1] / simulations)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws for each interval."""
    found = intervals.resampling.interval
    monkeypatch.setattr(intervals.resampling, "interval", lambda *args, **kwargs: found(*args, **{**kwargs, "resamples": 150}))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_groups_that_are_drawn_whole_are_covered_and_rows_drawn_one_by_one_are_not() -> None:
    whole, apart = coverage("question-answering", MANY, 60), coverage("question-answering", MANY, 60, together=False)
    assert all(share >= 0.88 for share in whole), whole
    assert all(share <= 0.8 for share in apart), apart


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", ["text-classification, pairs", "text-regression"])
def test_few_groups_are_covered_by_the_interval_of_student(case: str) -> None:
    assert all(share >= 0.88 for share in coverage(case, FEW, 60))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_every_task_is_covered(case: str) -> None:
    many, few = coverage(case, MANY, 2000), coverage(case, FEW, 2000)
    print(f"{case}: {many} of {MANY} groups, {few} of {FEW}")
    least = 0.92 if CASES[case][0] == "perplexity" else 0.93  # losses have a long tail: 0.923 for text to text
    assert all(least <= share <= 0.97 for share in many), many
    assert all(0.93 <= share <= 0.995 for share in few), few  # of few groups an interval is rather too wide: 0.9915 for a rank correlation
