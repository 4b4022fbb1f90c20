"""Calibration: biases that are known are removed, and the fit is the optimum that a search over a grid finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from distill.labeller.calibration import LARGEST, bias_of, fitted, without_bias


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_a_text_without_content_gets_equal_probabilities(seed: int, classes: int) -> None:
    random = np.random.default_rng(seed)
    reference = log_softmax(random.normal(0, 2, (3, classes)), axis=1)
    mean = np.log(np.exp(reference).mean(axis=0))[None]
    np.testing.assert_allclose(np.exp(without_bias(mean, bias_of(reference))), np.full((1, classes), 1 / classes), rtol=1e-9)


def test_an_offset_of_a_class_is_removed() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 1, (200, 3))
    offset = np.array([2.0, -1.0, 0.0])
    biased, bias = log_softmax(logits + offset, axis=1), bias_of(log_softmax(offset[None], axis=1))
    np.testing.assert_allclose(without_bias(biased, bias), log_softmax(logits, axis=1), atol=1e-9)


def _loss(log_p: np.ndarray, labels: np.ndarray, scale: float, offset: np.ndarray) -> float:
    fit = log_softmax(log_p * scale + offset, axis=1)
    return -float(fit[np.arange(len(labels)), labels].mean())


@pytest.mark.parametrize("offsets", [False, True])
def test_the_fit_is_the_best_of_a_grid(offsets: bool) -> None:
    random = np.random.default_rng(3)
    logits = random.normal(0, 2, (400, 2))
    labels = (random.random(400) < 1 / (1 + np.exp(-(logits[:, 1] - logits[:, 0]) * 0.4 - 0.7))).astype(np.int64)
    log_p = log_softmax(logits, axis=1)
    found = fitted(log_p, labels, offsets)
    own = _loss(log_p, labels, found.scale, np.array(found.offset))
    for scale in (*np.linspace(0.05, 2, 40), 0.98 * found.scale, 1.02 * found.scale):
        for shift in np.linspace(-2, 2, 41) if offsets else [0.0]:
            assert own <= _loss(log_p, labels, scale, np.array([-shift / 2, shift / 2])) + 5e-5
    assert sum(found.offset) == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(np.exp(found(log_p)).sum(axis=1), 1)


def test_a_temperature_changes_no_label() -> None:
    random = np.random.default_rng(1)
    log_p = log_softmax(random.normal(0, 2, (50, 4)), axis=1)
    found = fitted(log_p, random.integers(0, 4, 50), offsets=False)
    assert found.offset == (0.0, 0.0, 0.0, 0.0)
    np.testing.assert_array_equal(found(log_p).argmax(axis=1), log_p.argmax(axis=1))


def test_rows_that_are_all_right_have_a_finite_scale() -> None:
    log_p = log_softmax(np.array([[3.0, 0.0], [0.0, 3.0]]), axis=1)
    found = fitted(log_p, np.array([0, 1]), offsets=True)
    assert 1 < found.scale <= LARGEST
    assert np.isfinite(found(log_p)).all()
