"""Int8 weights, float activations (scheme w8a16): a quarter of the bytes of float32 to read, and no activation is rounded.

    q = clamp(rint(W / s), -127, 127)      y = x @ (s q).T + b

with a float32 scale s per output channel, rounding half to even. Weights always have 8 bits: they are multiplied in float, where no integer
sum can saturate.

A quantized checkpoint (`foundation.schemes.checkpoint`) stores s q in float; rint(w / s) recovers q.

Shape suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from foundation.schemes.int8 import OFF_GRID, are_codes, levels, on_grid, quantize
from foundation.schemes.scales import Entry, Grid, Layer, Stored, positive
from foundation.schemes.weight_only import WeightOnlyLinear

BITS = 8
LARGEST = levels(BITS)
WRONG_SCALES = "its scales must be positive numbers, one for each output"


@dataclass(frozen=True)
class WeightScales:
    """The scales of one linear layer in w8a16."""

    SCHEME: ClassVar[str] = "w8a16"
    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    weight_scale: Tensor
    """float32 [O]."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> WeightScales:
        """Returns the scales of a layer, read from a checkpoint."""
        if entry["weight_bits"] != BITS:
            raise ValueError(f"weight_bits must be {BITS}")
        return cls(tensors[f"{name}.weight_scale"])

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> WeightScales:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        return cls(weight.scale)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        return {"weight_scale": self.weight_scale}

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        return {"weight_bits": BITS}

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, as the checkpoint stores them."""
        return on_grid(weight_OI, self.weight_scale, LARGEST)

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, int8 `[O, I]`."""
        return quantize(weight_OI, self.weight_scale[:, None], -LARGEST, LARGEST)

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes: int8, a scale for each output."""
        return Stored(codes_OI.numpy(), self.weight_scale.numpy())

    def module(self, name: str, layer: Layer) -> Int8WeightLinear:
        """Returns the layer with int8 weights for a float layer."""
        assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
        bias_O = None if layer.bias is None else layer.bias.detach()
        return Int8WeightLinear(name, self.codes(layer.weight.detach().float()), self, bias_O)

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns why these scales do not match the layer's grid weights, or None if they match."""
        if self.weight_scale.shape != (len(weight_OI),) or not positive(self.weight_scale):
            return WRONG_SCALES
        steps_OI = weight_OI.float() / self.weight_scale[:, None]
        return None if are_codes(steps_OI, self.codes(weight_OI.float()), weight_OI.dtype) else OFF_GRID


class Int8WeightLinear(WeightOnlyLinear):
    """A linear layer with int8 weights, multiplied in float.

    Args:
        name: Module path.
        weight_OI: Codes int8 [O, I].
        scales: Scales of the layer.
        bias_O: Float [O], or None.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, name: str, weight_OI: Tensor, scales: WeightScales, bias_O: Tensor | None) -> None:
        super().__init__()
        self.name = name
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", weight_OI)
        self.register_buffer("weight_scale", scales.weight_scale)
        self.register_buffer("bias", bias_O)

    def dequantized(self) -> Tensor:
        """Returns the weights, float32 [O, I]."""
        return self.weight.float() * self.weight_scale[:, None]

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
