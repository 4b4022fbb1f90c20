"""An engine that rounds tokens by itself: as close to float as torch is enough, further is not."""

from __future__ import annotations

import numpy as np

from export.parity.own_rounding import further_than_torch

TASK = "text-classification"


def logits(noise: float, seed: int) -> np.ndarray:
    exact = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
    return exact + np.random.default_rng(seed).normal(size=exact.shape).astype(np.float32) * noise


def test_an_engine_may_be_as_far_from_float_as_torch_is() -> None:
    labels = np.zeros(2000, np.int64)
    floating, torch = logits(0, 1), logits(0.3, 2)
    assert further_than_torch(TASK, floating, torch, torch, labels) is None
    assert further_than_torch(TASK, floating, torch, logits(0.1, 3), labels) is None
    reason = further_than_torch(TASK, floating, torch, logits(0.6, 4), labels)
    assert reason is not None
    assert "predictions differ from those with float activations, of torch" in reason


def test_an_engine_that_equals_float_passes_even_where_torch_is_exact() -> None:
    labels = np.zeros(2000, np.int64)
    floating = logits(0, 1)
    assert further_than_torch(TASK, floating, floating, logits(1e-6, 2), labels) is None
    assert further_than_torch(TASK, floating, floating, logits(0.5, 2), labels) is not None
