"""An engine that rounds tokens by itself: as close to float as torch is enough, further is not."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from export.parity import own_rounding
from export.parity.own_rounding import fewer_than_chance, further_than_torch, rounding_head, tail
from foundation.labels.classes import ClassIds
from foundation.models.folder import Checkpoint

HERE = Path()

TASK = "text-classification"


def logits(noise: float, seed: int) -> np.ndarray:
    exact = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
    return exact + np.random.default_rng(seed).normal(size=exact.shape).astype(np.float32) * noise


def test_an_engine_may_be_as_far_from_float_as_torch_is() -> None:
    labels = ClassIds(np.zeros(2000, np.int64))
    floating, own = logits(0, 1), logits(0.3, 2)
    assert further_than_torch(TASK, floating, own, own, labels) is None
    assert further_than_torch(TASK, floating, own, logits(0.1, 3), labels) is None
    reason = further_than_torch(TASK, floating, own, logits(0.6, 4), labels)
    assert reason is not None
    assert "predictions differ from those with float activations, of torch" in reason


def test_an_engine_that_equals_float_passes_even_where_torch_is_exact() -> None:
    labels = ClassIds(np.zeros(2000, np.int64))
    floating = logits(0, 1)
    assert further_than_torch(TASK, floating, floating, logits(1e-6, 2), labels) is None
    assert further_than_torch(TASK, floating, floating, logits(0.5, 2), labels) is not None


def test_chance_is_no_reason_and_a_clear_loss_is() -> None:
    """Of 2,000 predictions 100 differ in torch; the engine differs in as many others, and a few more."""
    labels, floating = ClassIds(np.zeros(2000, np.int64)), np.tile(np.float32([1, 0]), (2000, 1))
    own, close, far = (floating.copy() for _ in range(3))
    own[:100], close[100:210], far[100:260] = (np.float32([0, 1]),) * 3
    for answers in (own, close, far):
        answers += 0.05  # so that medians are alike
    assert further_than_torch(TASK, floating, own, close, labels) is None
    reason = further_than_torch(TASK, floating, own, far, labels)
    assert reason is not None
    assert reason.startswith("160 of 2000 predictions differ from those with float activations, of torch 100")
    own += 0.05
    assert further_than_torch(TASK, floating, own, close + np.float32(0.04), labels) is None
    assert further_than_torch(TASK, floating, own, close + np.float32(0.07), labels) is not None, "medians of 0.12 and 0.10"


def test_the_head_reads_rounded_tokens_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_rounding, "load_tables", lambda _: {"transformer.wte": torch.ones(31)})
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=31, n_positions=8)).eval()
    ids_bL = torch.randint(0, 31, (2, 5))
    with torch.no_grad():
        before = model(ids_bL).logits
        hidden_bLD = model.transformer(ids_bL).last_hidden_state
        with rounding_head(model, Checkpoint(HERE)):
            inside = model(ids_bL).logits
        after = model(ids_bL).logits
    expected = torch.empty_like(inside)
    for row in range(2):
        for token in range(5):
            values = hidden_bLD[row, token]
            scale = float(values.abs().max()) / 127
            codes = torch.tensor([round(float(value) / scale) for value in values])  # to even, as int8 is rounded
            assert int(codes.abs().max()) == 127
            expected[row, token] = model.lm_head.weight @ (codes * scale)
    torch.testing.assert_close(inside, expected, atol=1e-5, rtol=1e-5)
    assert (inside - before).abs().max() > 1e-4
    assert torch.equal(before, after)


def test_a_head_with_float_rows_reads_what_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_rounding, "load_tables", lambda _: {})
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=31, n_positions=8)).eval()
    ids_bL = torch.arange(5)[None]
    with torch.no_grad(), rounding_head(model, Checkpoint(HERE)):
        inside = model(ids_bL).logits
    with torch.no_grad():
        assert torch.equal(model(ids_bL).logits, inside)


@pytest.mark.parametrize(("lost", "won", "passes"), [(0, 0, True), (8, 3, True), (3, 8, True), (6, 0, True), (7, 0, False), (14, 3, False)])
def test_an_engine_may_lose_as_many_answers_as_chance_explains(lost: int, won: int, passes: bool) -> None:
    floating = np.zeros((32, 4), np.int32)
    own, engine = floating.copy(), floating.copy()
    engine[:lost, 2] = 1
    own[lost : lost + won, 3] = 1
    both = slice(lost + won, lost + won + 5)  # what neither gives says nothing
    own[both], engine[both] = 2, 3
    reason = fewer_than_chance(floating, own, engine)
    assert (reason is None) == passes
    if reason is not None:
        assert reason.endswith(f"{lost} are only torch's, {won} only the engine's")


def test_the_tail_of_a_fair_coin_is_counted() -> None:
    for tosses in range(9):
        sides = list(itertools.product((0, 1), repeat=tosses))
        for heads in range(tosses + 1):
            assert tail(heads, tosses) == sum(sum(one) >= heads for one in sides) / len(sides)
