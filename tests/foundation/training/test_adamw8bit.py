"""AdamW with moments of 8 bits against its formulas with numbers one at a time, against AdamW, and over a kill."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.labels.classes import ClassIds
from foundation.training import adamw8bit
from foundation.training.adamw8bit import AdamW8bit, bytes_of, levels, restored, rounded
from foundation.training.choices import Optimizer
from foundation.training.optimizers import moment_bytes, optimizer_of
from tests.foundation.training.test_train import learns_and_continues

pytestmark = pytest.mark.whole


def levels_by_hand(signed: bool) -> list[float]:
    """Seven decades below 1; the middles of 1, 2, 4, ... equal parts of each if signed, else of twice as many."""
    found = [0.0] if signed else []
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        for part in range(parts):
            found.append(10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts))
    return [*found[:-1], 1.0] if signed else [*found, 1.0]


@pytest.mark.parametrize(("signed", "count"), [(True, 128), (False, 255)])
def test_levels_are_those_of_dynamic_trees(signed: bool, count: int) -> None:
    found = levels(signed).tolist()
    assert len(found) == count
    assert found == pytest.approx(levels_by_hand(signed), rel=1e-6)
    assert found == sorted(set(found))


def block_by_hand(values: list[float], signed: bool) -> list[float]:
    """A block of a moment after rounding: each entry at the nearest level."""
    known, scale = levels(signed).tolist(), max(map(abs, values))
    nearest = [min(known, key=lambda level, value=value: abs(level - abs(value) / scale)) if scale else 0.0 for value in values]  # type: ignore[misc]
    return [math.copysign(level * scale, value) for level, value in zip(nearest, values, strict=True)]


@given(st.integers(0, 700), st.booleans(), st.integers(-30, 30), st.integers(0, 2**31))
def test_a_rounded_moment_has_the_nearest_levels_and_stays_as_it_is(number: int, signed: bool, power: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(number, generator=draw) * 10.0 ** (-8 * torch.rand(number, generator=draw)) * 10.0**power
    values[::7] = 0.0
    values = values if signed else values.abs()
    codes, scales = rounded(values, signed)
    assert codes.dtype == (torch.int8 if signed else torch.uint8)
    assert scales.shape == (-(-number // 256),)
    found = restored(codes, scales)
    expected = [value for start in range(0, number, 256) for value in block_by_hand(values[start : start + 256].tolist(), signed)]
    largest = scales.repeat_interleave(256)[:number]
    assert bool(((found - torch.tensor(expected)).abs() <= 1e-6 * largest).all())
    again = rounded(found, signed)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_of_zeros_stay_zeros(signed: bool) -> None:
    codes, scales = rounded(torch.zeros(300), signed)
    assert not restored(codes, scales).any()


@settings(max_examples=20)
@given(st.integers(-8, 0), st.integers(0, 2**31))
def test_small_gradients_beside_large_ones_make_no_long_steps(power: int, seed: int) -> None:
    """A second moment that was rounded to 0 would make a step up to 32 times as long as one of AdamW, after 40 steps 6 times."""
    draw = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW8bit([{"params": [weight], "weight_decay": 0.0}], 1.0)
    sizes = torch.ones(4096)
    sizes[1::2] = 10.0**power
    for _ in range(40):
        before = weight.detach().clone()
        weight.grad = sizes * (1 + 0.1 * torch.randn(4096, generator=draw))
        optimizer.step()
        assert float((weight.detach() - before).abs().max()) < 3  # that of AdamW: 1


def steps_by_hand(w: list[float], gradients: list[list[float]], rate: float, decay: float) -> list[float]:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(gradients, 1):
        m = [0.9 * old + 0.1 * new for old, new in zip(m, g, strict=True)]
        v = [0.999 * old + 0.001 * new**2 for old, new in zip(v, g, strict=True)]
        w = [
            each - rate * decay * each - rate * (a / (1 - 0.9**t)) / (math.sqrt(b / (1 - 0.999**t)) + 1e-8)
            for each, a, b in zip(w, m, v, strict=True)
        ]
        m, v = (
            [value for start in range(0, len(w), 256) for value in block_by_hand(moment[start : start + 256], signed)]
            for moment, signed in ((m, True), (v, False))
        )
    return w


@pytest.mark.parametrize("chunk", [2**20, 512])
def test_steps_are_those_of_numbers_one_at_a_time(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw8bit, "FEWEST", 0)
    monkeypatch.setattr(adamw8bit, "CHUNK", chunk)
    weight = nn.Parameter(torch.randn(17, 61))
    before, gradients = weight.detach().flatten().tolist(), torch.randn(3, 17, 61) * 10.0 ** torch.randint(-4, 1, (17, 61))
    optimizer = AdamW8bit([{"params": [weight], "weight_decay": 0.1}], 0.02)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = steps_by_hand(before, gradients.flatten(1).tolist(), 0.02, 0.1)
    apart = (weight.detach().flatten() - torch.tensor(expected)).abs()
    assert float(apart.quantile(0.99)) < 1e-5  # an entry between two levels may go to the other one
    assert {state.dtype for state in optimizer.state[weight].values()} == {torch.float32, torch.int8, torch.uint8}


def test_small_weights_are_trained_as_by_adamw() -> None:
    made: list[Tensor] = []
    for kind in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        layer, draw = nn.Linear(63, 63), torch.Generator().manual_seed(1)
        optimizer = optimizer_of(Optimizer(name=kind), layer, 1e-2, 0.1)
        for _ in range(5):
            layer(torch.randn(8, 63, generator=draw)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append(layer.weight.detach())
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-6)


def loss_after(name: Any, steps: int = 150) -> float:
    """The loss of a network that learns another one."""
    torch.manual_seed(0)
    taught, teacher = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2))
    optimizer, total = optimizer_of(Optimizer(name=name), taught, 3e-3, 0.01), 0.0
    for step in range(steps):
        x = torch.randn(32, 64)
        loss = (taught(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * (step >= steps - 20) / 20
    return total


def test_the_loss_stays_near_that_of_adamw() -> None:
    start, ours, theirs = loss_after("adamw", 1) * 20, loss_after("adamw8bit"), loss_after("adamw")
    assert theirs < 0.2 * start
    assert ours == pytest.approx(theirs, rel=0.1)


@pytest.fixture(scope="module")
def sentences(words: list[str]) -> tuple[list[str], ClassIds]:
    rows = [f"{first} {second} film" for first in words[:5] for second in words[5:9]]
    return rows, ClassIds(np.array(["good" in row.split() for row in rows], np.int64))


@pytest.mark.slow
def test_a_killed_training_continues_to_equal_bits(
    tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw8bit, "FEWEST", 100)
    usual: dict[str, Any] = {"optimizer": Optimizer(name="adamw8bit"), "learning_rate": 3e-3, "epochs": 10}
    learns_and_continues(tiny_bert, sentences, told, tmp_path, **usual)


def test_plan_counts_codes_and_scales() -> None:
    weights = [torch.empty(100, 300), torch.empty(300)]
    optimizer = AdamW8bit([{"params": weights, "weight_decay": 0.0}], 0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    assert moment_bytes("adamw8bit", weights) == held == bytes_of(30_000) + bytes_of(300)
    assert held < 0.3 * moment_bytes("adamw", weights)
