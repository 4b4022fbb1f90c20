"""What zeros have emptied, counted after groups were taken out of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foundation.models.architecture.structure import Structure
from prune.emptied import emptied, unread
from prune.sparsify.lasso import layer_mask, pieces
from prune.sparsify.one_shot import zero_gone
from prune.sparsify.patterns import Blocks

KEY = "stages.sparsify"


def test_outputs_and_inputs_that_are_zero_from_end_to_end() -> None:
    weight = torch.ones(3, 4)
    assert emptied(weight) == {"outputs": 0, "inputs": 0}
    weight[1], weight[0, 2], weight[2, 2] = 0, 0, 0
    assert emptied(weight) == {"outputs": 1, "inputs": 1}
    assert emptied(torch.zeros(3, 4)) == {"outputs": 3, "inputs": 4}


def test_emptied_by_whole_columns_then_counted(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    assert unread(model, structure) == {"heads": 0, "neurons": 0}
    layer = model.bert.encoder.layer[1]
    ffn, attention = layer.output.dense, layer.attention.output.dense
    with torch.no_grad():
        ffn.weight[:, [1, 2, 3, 10, 20, 23]] *= 1e-3
        attention.weight[:, 4:12] *= 1e-3  # two of four heads
    for linear, share in ((ffn, 6 / 24), (attention, 0.5)):
        zero_gone(linear, layer_mask(linear.weight, pieces(Blocks(16, 24), "columns"), share))
    assert emptied(ffn.weight) == {"outputs": 0, "inputs": 6}
    assert emptied(attention.weight) == {"outputs": 0, "inputs": 8}
    assert unread(model, structure) == {"heads": 2, "neurons": 6}
    with torch.no_grad():
        attention.weight[0, 5] = 1
    assert unread(model, structure) == {"heads": 1, "neurons": 6}  # one weight reads all of a head
