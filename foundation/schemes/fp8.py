"""FP8 (scheme fp8): weights and activations in E4M3, products in float.

E4M3 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433) has 4 exponent bits, 3 mantissa bits, no infinity, and a maximum of 448.
Scales are float32: per output channel for weights, per tensor from calibration for activations. Rounding is half to even, saturating:

    e_w = E4M3(clamp(W / s_w, -448, 448))        s_w = max |W_o| / 448
    e_x = E4M3(clamp(x / s_x, -448, 448))
    y   = (e_x @ e_w.T) * (s_x * s_w) + b        summed in float32

The rounding error of E4M3 is relative, at most 1/16, while int8 has equal steps over its whole range. A few outliers therefore do not cost
the other values precision, and ranges need no clipping. On CUDA with compute capability 8.9 or higher the product is `torch._scaled_mm`;
elsewhere the same numbers are multiplied in float32.

A quantized checkpoint (`foundation.schemes.checkpoint`) stores s_w e_w in float; E4M3(w / s_w) recovers e_w.

Not supported: E5M2, a format for gradients; scales per token.

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from foundation.schemes.int8 import OFF_GRID, WRONG_SCALES, QuantizedLinear, check_finite
from foundation.schemes.scales import Entry, Grid, Layer, Stored, positive

LARGEST = 448
STORED = torch.float8_e4m3fn
HARDWARE = (8, 9)
"""Lowest compute capability with E4M3 matrix products (Ada)."""


@dataclass(frozen=True)
class Fp8Scales:
    """The scales of one linear layer in fp8."""

    SCHEME: ClassVar[str] = "fp8"
    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    weight_scale: Tensor
    """float32 [O]."""
    input_scale: Tensor
    """float32 []."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> Fp8Scales:
        """Returns the scales of a layer, read from a checkpoint."""
        if entry["weight_bits"] != 8:
            raise ValueError("weight_bits must be 8")
        return cls(tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"])

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> Fp8Scales:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        assert input_scale is not None, "activations have one scale"
        return cls(weight.scale, input_scale)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        return {"weight_scale": self.weight_scale, "input_scale": self.input_scale}

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        return {"weight_bits": 8}

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, as the checkpoint stores them."""
        return to_e4m3(weight_OI, self.weight_scale[:, None]).float() * self.weight_scale[:, None]

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, float8_e4m3fn `[O, I]`."""
        return to_e4m3(weight_OI, self.weight_scale[:, None])

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes: FLOAT8E4M3FN, a scale for each output."""
        codes = codes_OI.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        return Stored(codes, self.weight_scale.numpy(), np.zeros(len(codes), codes.dtype))

    def module(self, name: str, layer: Layer) -> Fp8Linear:
        """Returns the fp8 layer for a float layer."""
        assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
        bias_O = None if layer.bias is None else layer.bias.detach().float()
        return Fp8Linear(name, self.codes(layer.weight.detach().float()), self, bias_O)

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns why these scales do not match the layer's grid weights, or None if they match."""
        sound = self.weight_scale.shape == (len(weight_OI),) and self.input_scale.shape == ()
        if not sound or not positive(self.weight_scale, self.input_scale):
            return WRONG_SCALES
        steps_OI = weight_OI.float() / self.weight_scale[:, None]
        # A cast to bfloat16 changes a weight by a relative 2^-9 at most; half a step of E4M3 is a relative 2^-5, or 2^-10 near 0.
        tolerance_OI = steps_OI.abs() * torch.finfo(weight_OI.dtype).eps + 1e-4
        near = (steps_OI - to_e4m3(steps_OI, torch.ones(())).float()).abs() <= tolerance_OI
        return None if bool(near.all()) else OFF_GRID


class Fp8Linear(QuantizedLinear):
    """A linear layer in E4M3: quantizes the input, multiplies, rescales once and adds the bias.

    Args:
        name: Module path, for messages.
        weight_OI: float8_e4m3fn [O, I].
        scales: Scales of the layer.
        bias_O: float32 [O], or None.
    """

    input_scale: Tensor

    def __init__(self, name: str, weight_OI: Tensor, scales: Fp8Scales, bias_O: Tensor | None) -> None:
        held_OI = weight_OI.view(torch.int8)  # T5 casts its inputs to the type of a weight, unless it is int8
        super().__init__(name, held_OI, bias_O, {"weight_scale": scales.weight_scale, "input_scale": scales.input_scale})

    def codes(self, x: Tensor) -> Tensor:
        """Returns the input in E4M3, float8_e4m3fn of the same shape."""
        return to_e4m3(x, self.input_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the dtype of the input; summed in float32.

        Raises:
            InputError: The input holds NaN or infinity; the message names the layer.
        """
        check_finite(self.name, x)
        products = fp8_matmul(self.codes(x.float()).reshape(-1, self.in_features), self.weight.view(STORED))
        return self.finished(products * (self.input_scale * self.weight_scale), x)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Returns x / scale in E4M3, saturated to [-448, 448], float8_e4m3fn of the shape of `x`.

    Args:
        x: float32, any shape.
        scale: float32, positive, broadcastable to the shape of `x`.
    """
    return (x / scale).clamp_(-LARGEST, LARGEST).to(STORED)  # without the clamp, values above 448 would become NaN


def fp8_matmul(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    """Returns `a @ b.T` summed in float32, float32 [N, O]; uses `torch._scaled_mm` on GPUs that support it.

    Args:
        a_NI: float8_e4m3fn [N, I].
        b_OI: float8_e4m3fn [O, I].
    """
    if not (a_NI.is_cuda and torch.cuda.get_device_capability(a_NI.device) >= HARDWARE):
        return a_NI.float() @ b_OI.float().T
    n, outputs = a_NI.shape[0], b_OI.shape[0]
    rows, inputs = -n % 16, -a_NI.shape[1] % 16  # cuBLASLt requires multiples of 16; zeros do not change the sums
    a_NI, b_OI = _padded(a_NI, inputs, rows), _padded(b_OI, inputs, -outputs % 16)
    one = torch.ones((), device=a_NI.device)
    return torch._scaled_mm(a_NI, b_OI.T, scale_a=one, scale_b=one, out_dtype=torch.float32)[:n, :outputs]


def _padded(values: Tensor, right: int, below: int) -> Tensor:
    """Returns a float8 matrix padded with zeros on the right and below; torch cannot pad float8, so the bytes are padded."""
    return nn.functional.pad(values.view(torch.uint8), (0, right, 0, below)).contiguous().view(STORED)
