"""Losses of any number of labels, written out label by label."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.sets import SetLoss

CASES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def drawn(case: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, labels, seed = case
    random = torch.Generator().manual_seed(seed)
    return (
        3 * torch.randn(rows, labels, generator=random),
        3 * torch.randn(rows, labels, generator=random),
        torch.rand(rows, labels, generator=random) < 0.5,
    )


@given(CASES, st.floats(0, 0.9))
def test_labelled_is_binary_cross_entropy(case: tuple[int, int, int], smoothing: float) -> None:
    logits, _, labels = drawn(case)
    for row, true, loss in zip(logits.tolist(), labels.tolist(), SetLoss().labelled(logits, labels, smoothing).tolist(), strict=True):
        targets = [(1 - smoothing) * y + smoothing / 2 for y in true]
        expected = [-(y * math.log(sigmoid(z)) + (1 - y) * math.log(sigmoid(-z))) for z, y in zip(row, targets, strict=True)]
        assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-4, abs=1e-6)


@given(CASES, st.floats(0.5, 5))
def test_taught_is_the_divergence_of_each_label(case: tuple[int, int, int], temperature: float) -> None:
    logits, target, labels = drawn(case)
    for ours, theirs, loss in zip(
        logits.tolist(), target.tolist(), SetLoss().taught(logits, target, labels, temperature).tolist(), strict=True
    ):
        apart = 0.0
        for z, t in zip(ours, theirs, strict=True):
            p, q = sigmoid(t / temperature), sigmoid(z / temperature)
            apart += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        assert loss == pytest.approx(temperature**2 * apart / len(ours), rel=1e-2, abs=1e-4)


@given(CASES, st.floats(0.5, 5))
def test_averaged_is_the_mean_probability(case: tuple[int, int, int], temperature: float) -> None:
    one, other, _ = drawn(case)
    found = torch.sigmoid(SetLoss().averaged([one, other], (0.25, 0.75), temperature) / temperature)
    torch.testing.assert_close(
        found, 0.25 * torch.sigmoid(one / temperature) + 0.75 * torch.sigmoid(other / temperature), atol=1e-5, rtol=1e-4
    )


def test_drawn_gradients_have_the_curvature_of_the_loss() -> None:
    """E[g^2] of answers drawn from the model is its Fisher information, p (1 - p) of each label."""
    logits = torch.tensor([0.5, -2.0]).expand(100_000, 2)
    drawn_NC = SetLoss().drawn_gradient(logits, torch.zeros(1), 1.0, torch.Generator().manual_seed(0))
    p = torch.sigmoid(logits[0])
    torch.testing.assert_close(drawn_NC.square().mean(dim=0), p * (1 - p), atol=5e-3, rtol=0)
    assert float(drawn_NC.mean().abs()) < 5e-3
