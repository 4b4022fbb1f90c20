"""A static int8 engine of a model that amplifies rounding: as far from float as torch is enough, further is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from export.parity.amplified import NOISE, further_in_more_rows, nudged

pytestmark = pytest.mark.whole

TASK = "text-generation"


def answers(other: float, noise: float, seed: int, shape: tuple[int, int] = (100, 20)) -> np.ndarray:
    """Answers of which this share are others than those of float, and whose nll are this far from it."""
    drawn = np.random.default_rng(seed)
    nll = np.random.default_rng(0).random(shape) + drawn.normal(size=shape) * noise
    return np.stack([nll, drawn.random(shape) < other], axis=-1).astype(np.float32)


def test_equally_far_passes_and_clearly_further_does_not() -> None:
    floating, own = answers(0, 0, 1), answers(0.1, 0.1, 2)
    assert further_in_more_rows(TASK, floating, own, own) is None
    assert further_in_more_rows(TASK, floating, own, answers(0.1, 0.1, 3)) is None
    assert further_in_more_rows(TASK, floating, own, answers(0.02, 0.02, 4)) is None
    reason = further_in_more_rows(TASK, floating, own, answers(0.2, 0.1, 5))
    assert reason is not None
    assert reason.startswith("its predictions are further")
    reason = further_in_more_rows(TASK, floating, own, answers(0.1, 0.2, 6))
    assert reason is not None
    assert reason.startswith("its nll are further")


def test_rows_count_and_not_their_tokens() -> None:
    """One row in which everything is lost is one row."""
    floating, own = answers(0, 0, 1), answers(0, 0, 1)
    engine = own.copy()
    engine[0, :, 1], engine[0, :, 0] = 7, 50
    assert further_in_more_rows(TASK, floating, own, engine) is None
    engine[:8] = engine[0]
    assert further_in_more_rows(TASK, floating, own, engine) is not None


def test_chance_refuses_few_engines_that_are_no_further() -> None:
    floating = answers(0, 0, 1)
    refused = [further_in_more_rows(TASK, floating, answers(0.1, 0.1, 2 * seed), answers(0.1, 0.1, 2 * seed + 1)) for seed in range(5, 205)]
    assert sum(reason is not None for reason in refused) <= 12  # two tests at 1 %: 4 expected


def test_a_nudge_moves_embeddings_by_its_noise_and_is_the_same_every_time() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=31, n_positions=64)).eval()
    ids_bL = torch.randint(0, 31, (4, 64))
    before = model.transformer.wte(ids_bL)
    moved = []
    for _ in range(2):
        with nudged(model):
            moved.append(model.transformer.wte(ids_bL))
    assert torch.equal(*moved)
    error = (moved[0] / before - 1).std().item()
    assert error == pytest.approx(NOISE, rel=0.1)
    assert torch.equal(model.transformer.wte(ids_bL), before)
