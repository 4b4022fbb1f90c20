"""Loads of experts against counts of the router's own answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from foundation.models.architecture.structure import Structure
from foundation.training.train import Batch
from prune.routing import loads


def batch_of(features: dict[str, torch.Tensor]) -> Batch:
    rows = len(features["input_ids"])
    return Batch(features, torch.zeros(rows, dtype=torch.int64), np.arange(rows), 0, 1)


@pytest.mark.parametrize("padded", [False, True])
def test_loads_are_the_shares_of_the_routers_choices(
    make_model: Callable[..., Any], make_features: Callable[..., Any], padded: bool
) -> None:
    model = make_model("mixtral")
    batches = [make_features("mixtral", rows=2, length=length, seed=length) for length in (5, 9)]
    masks = [torch.ones_like(batch["input_ids"]) for batch in batches]
    if padded:
        masks[1][1, 4:] = 0
        batches[1]["attention_mask"] = masks[1]
    expected = np.zeros((3, 4))
    for features, mask in zip(batches, masks, strict=True):
        with torch.inference_mode():
            routers = model(**features, output_router_logits=True).router_logits
        for block, logits in enumerate(routers):
            for token, real in zip(logits.reshape(-1, 4), mask.flatten().tolist(), strict=True):
                if real:
                    expected[block, token.topk(2).indices.numpy()] += 1
    found = loads(model, Structure.of(model, "prune"), [batch_of(features) for features in batches])
    np.testing.assert_allclose(found, expected / expected.sum(axis=1, keepdims=True), atol=1e-9)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_experts_has_no_loads(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model("bert")
    assert loads(model, Structure.of(model, "prune"), [batch_of(make_features("bert"))]) == [[], [], []]
