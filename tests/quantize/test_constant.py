"""Layers that no engine multiplies for a row are found by what goes into them and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from foundation.models.forward import linears
from quantize.constant import constant_layers, unused_layers


class Model(nn.Module):
    """Adds a table of positions, itself made by a layer, to its rows; one layer reads both, one is dead and one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.positions, self.both, self.dead, self.idle = (nn.Linear(4, 4) for _ in range(4))
        self.embeddings = nn.Embedding(9, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.embeddings(input_ids)
        self.dead(states)
        answer: Tensor = self.both(states) + self.both(self.positions(self.table))
        return answer


def forward(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    answer: Tensor = model(**features)
    return answer


def test_layers_that_read_only_weights_are_constant() -> None:
    model, features = Model(), {"input_ids": torch.arange(10).remainder(9).reshape(2, 5)}
    assert constant_layers(model, linears(model), features, forward) == ["positions"]


def test_equal_rows_say_nothing() -> None:
    model, features = Model(), {"input_ids": torch.ones(3, 5, dtype=torch.long)}
    assert constant_layers(model, linears(model), features, forward) == []


def test_layers_that_nothing_reads_are_unused() -> None:
    model, features = Model(), {"input_ids": torch.arange(10).remainder(9).reshape(2, 5)}
    with torch.inference_mode(False), torch.no_grad():
        assert unused_layers(model, linears(model), features, forward) == ["dead"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())
