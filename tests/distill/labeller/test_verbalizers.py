"""Label words: probabilities of classes against loops written out, and words that do not exclude each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.labeller.verbalizers import check_words, class_scores, listed_words
from tests.problems import raises_problem

CLASSES = ("negative", "positive")


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_probability_of_a_class_is_the_mean_over_its_words(seed: int, length_normalized: bool) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, random.integers(2, 5))
    class_W = np.repeat(np.arange(len(sizes)), sizes)
    scores = random.uniform(-30, 0, (3, len(class_W))).astype(np.float32)
    lengths = random.integers(1, 6, scores.shape)
    found = class_scores(scores, lengths, class_W, length_normalized)
    for n in range(3):
        means = []
        for c in range(len(sizes)):
            own = [w for w in range(len(class_W)) if class_W[w] == c]
            means.append(sum(math.exp(float(scores[n, w]) / (lengths[n, w] if length_normalized else 1)) for w in own) / len(own))
        np.testing.assert_allclose(np.exp(found[n]), np.array(means) / sum(means), rtol=1e-6)


def test_a_class_with_more_words_has_no_advantage() -> None:
    found = class_scores(np.full((1, 4), -3.0), np.ones((1, 4)), np.array([0, 1, 1, 1]), False)
    np.testing.assert_allclose(np.exp(found), [[0.5, 0.5]])


def test_tiny_probabilities_stay_finite() -> None:
    found = class_scores(np.array([[-2000.0, -2001.0]]), np.ones((1, 2)), np.array([0, 1]), False)
    np.testing.assert_allclose(found[0, 0] - found[0, 1], 1.0)


def test_words_are_in_the_order_of_the_classes() -> None:
    words, class_W = listed_words({"positive": ["good"], "negative": ["bad", "poor"]}, CLASSES)
    assert (words, class_W.tolist()) == (["bad", "poor", "good"], [0, 0, 1])


@pytest.mark.parametrize(
    ("labels", "key", "parts"),
    [
        ({"negative": ["not"], "positive": ["not bad"]}, "labels.negative", ("'not' begins 'not bad' of 'positive'",)),
        ({"negative": ["positively bad"], "positive": ["positive"]}, "labels.positive", ("'positive' begins",)),
        ({"negative": ["same"], "positive": ["same "]}, "labels.negative", ("is also of 'positive'",)),
        ({"negative": ["bad", "bad"], "positive": ["good"]}, "labels.negative", ("'bad' given twice",)),
        ({"negative": [" "], "positive": ["good"]}, "labels.negative", ("a word of spaces",)),
        ({"negative": ["bad"], "positive": ["good"], "neutral": ["so"]}, "labels", ("'neutral' given", "negative, positive")),
        ({"negative": ["bad"], "postive": ["good"]}, "labels", ("'postive' given", "did you mean 'positive'?")),
        ({"negative": ["bad"]}, "labels", ("no words for the class 'positive'",)),
    ],
)
def test_words_that_do_not_fit_are_named(labels: dict[str, list[str]], key: str, parts: tuple[str, ...]) -> None:
    with raises_problem(key, *(part.rstrip("?").rstrip("'") for part in parts)):
        check_words(labels, CLASSES, "labels")


def test_words_of_one_class_may_begin_each_other() -> None:
    check_words({"negative": ["bad", "badly made"], "positive": ["good"]}, CLASSES, "labels")
