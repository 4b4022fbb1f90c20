"""A model that does not run in bfloat16 trains in float32, and is said to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foundation.training.precision import dtype_for
from tests.told import Told


class Mixing(nn.Module):
    """Writes the product of a layer into a tensor of the dtype of the input."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.layer, self.strict = nn.Linear(3, 3), strict

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.strict:
            torch.zeros_like(x).index_put_((torch.tensor([0]),), y[:1])
        return y


def test_a_model_that_mixes_dtypes_gets_float32() -> None:
    told, model = Told(), Mixing(strict=True).train()
    assert dtype_for(model, {"x": torch.ones(2, 3)}, torch.bfloat16, "finetune", told) == torch.float32
    assert len(told.warnings) == 1
    assert told.warnings[0].startswith("finetune: this model does not run in bfloat16 (Index put requires")
    assert model.training
    assert model.layer.training


def test_other_models_keep_bfloat16() -> None:
    told = Told()
    assert dtype_for(Mixing(strict=False), {"x": torch.ones(2, 3)}, torch.bfloat16, "finetune", told) == torch.bfloat16
    assert dtype_for(Mixing(strict=True), {"x": torch.ones(2, 3)}, torch.float32, "finetune", told) == torch.float32
    assert told.warnings == []


def test_layers_are_tried_as_they_train() -> None:
    class OnlyInTraining(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("mixes dtypes")
            return x

    told, model = Told(), nn.Sequential(OnlyInTraining(3, 3), nn.Dropout()).train()
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    assert dtype_for(model, {"x": torch.ones(2, 3)}, torch.bfloat16, "quantize", told) == torch.float32
    assert all(module.training for module in model.modules())


def test_a_model_that_computes_something_else_gets_float32() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return -y if y.dtype == torch.bfloat16 else y

    told, model = Told(), Wrong(3, 3)
    with torch.no_grad():
        model.bias.fill_(1.0)
    assert dtype_for(model, {"x": torch.ones(2, 3)}, torch.bfloat16, "finetune", told) == torch.float32
    assert told.warnings == ["finetune: this model computes something else in bfloat16 here (200% of its outputs); it trains in float32"]
