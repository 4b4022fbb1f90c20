"""Int6 weights, float activations (scheme w6a16): y = x @ (s * q).T with q in [-31, 31] and one scale for each output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.schemes.int8 import OFF_GRID, WRONG_SCALES, positive, quantize

HIGH = 31


@dataclass(frozen=True)
class Int6Scales:
    """The scales of one linear layer in w6a16."""

    SCHEME: ClassVar[str] = "w6a16"

    weight_scale: Tensor
    """float32 [O]."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Int6Scales:
        """Reads the scales of a layer from a checkpoint."""
        return cls(tensors[f"{name}.weight_scale"])

    @classmethod
    def chosen(cls, weight_scale: Tensor, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Int6Scales:
        """Returns the scales that quantization chose."""
        return cls(weight_scale)

    def tensors(self) -> dict[str, Tensor]:
        """Returns what `quantization.safetensors` keeps."""
        return {"weight_scale": self.weight_scale}

    def entry(self) -> dict[str, Any]:
        """Returns what `quantization.json` keeps."""
        return {"weight_bits": 6}

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, int8 `[O, I]` in [-31, 31]."""
        return quantize(weight_OI, self.weight_scale[:, None], -HIGH, HIGH)

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights that a checkpoint keeps."""
        return self.codes(weight_OI).float() * self.weight_scale[:, None]

    def module(self, name: str, linear: nn.Linear) -> nn.Linear:
        """Returns the layer with its weights on the grid; the products are float."""
        made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
        made.weight, made.bias = nn.Parameter(self.on_grid(linear.weight.detach().float())), linear.bias
        return made

    def problem(self, linear: nn.Linear) -> str | None:
        """Returns why these cannot be the scales of a layer with weights on their grid."""
        if self.weight_scale.shape != (linear.out_features,) or not positive(self.weight_scale):
            return WRONG_SCALES
        weight_OI = linear.weight.detach().float()
        return None if torch.allclose(self.on_grid(weight_OI), weight_OI, rtol=1e-5, atol=0) else OFF_GRID
