"""Losses of next-token prediction, against sums written out token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foundation.labels.next_token import IGNORED
from foundation.training.losses.tokens import TokenLoss, block_mean, token_losses

BLOCKS, LENGTH, VOCABULARY = 3, 5, 6


def batch(seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, target = (scale * torch.randn(BLOCKS, LENGTH, VOCABULARY, generator=generator) for _ in range(2))
    labels = torch.randint(0, VOCABULARY, (BLOCKS, LENGTH + 2), generator=generator, dtype=torch.int32)
    labels[:, LENGTH - 1 :] = IGNORED
    labels[1, 2:] = IGNORED
    return logits, target, labels


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.3]))
def test_losses_are_the_mean_of_each_block(seed: int, smoothing: float) -> None:
    logits, _, labels = batch(seed)
    for block, loss in enumerate(token_losses(logits, labels, smoothing)):
        log_p = torch.log_softmax(logits[block].double(), dim=-1)
        parts = [
            -(1 - smoothing) * log_p[position, int(label)] - smoothing * log_p[position].mean()
            for position, label in enumerate(labels[block, : LENGTH - 1])
            if label != IGNORED
        ]
        assert float(loss) == pytest.approx(float(sum(parts) / len(parts)), rel=1e-5)


@given(st.integers(0, 2**31), st.floats(0.5, 5))
def test_divergence_is_the_mean_of_each_block(seed: int, temperature: float) -> None:
    logits, target, labels = batch(seed)
    for block, loss in enumerate(TokenLoss().taught(logits, target, labels, temperature)):
        p, q = (torch.softmax(values[block].double() / temperature, dim=-1) for values in (target, logits))
        parts = [
            float((p[position] * (p[position].log() - q[position].log())).sum())
            for position, label in enumerate(labels[block, : LENGTH - 1])
            if label != IGNORED
        ]
        assert float(loss) == pytest.approx(temperature**2 * sum(parts) / len(parts), rel=1e-4, abs=1e-6)


def test_what_stands_behind_the_end_does_not_count() -> None:
    logits, target, labels = batch(0)
    changed = logits.clone()
    changed[:, -1] = 7.0
    changed[1, 2:] = -7.0
    assert torch.equal(token_losses(logits, labels), token_losses(changed, labels))
    assert torch.equal(TokenLoss().taught(logits, target, labels, 2.0), TokenLoss().taught(changed, target, labels, 2.0))


def test_equal_models_do_not_diverge() -> None:
    logits, _, labels = batch(0)
    assert float(TokenLoss().taught(logits, logits, labels, 2.0).abs().max()) < 1e-6


def test_the_mean_of_blocks_has_no_part_from_padding() -> None:
    values = torch.tensor([[1.0, 3.0, float("nan")]])
    assert block_mean(values, torch.tensor([[4, 5, IGNORED]])).tolist() == [2.0]
