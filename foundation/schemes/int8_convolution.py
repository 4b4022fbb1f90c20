"""True int8 for convolutions: integer codes, an exact integer convolution, one rescale. The convolution next to `foundation.schemes.int8`.

Weights have a scale per output channel, the input has one calibrated scale (scheme w8a8), and padding is with zeros, whose code is 0:

    q_w = clamp(rint(W / s_w), -L, L)            int8 [O, C / g, k...], L = 127 (8 bits) or 63 (7 bits)
    q_x = clamp(rint(x / s_x), -128, 127)        int8 [B, C, size...], as ONNX QuantizeLinear
    y   = float32(q_x * q_w) * (s_x * s_w) + b   * the convolution, accumulated in int32, exactly

A convolution is a sum of matrix products, one for each position t of its kernel, of the inputs that this position sees:

    y[b, o, p] = sum over t  sum over c  q_x[b, c, p stride + t dilation] q_w[o, c, t]

so that it needs no more memory than one of them. With groups each group of channels has its own product. With one input channel per group
(depthwise) products would be of one column; such a convolution runs in float32 instead, which is exact: its sums of at most 2^10 products
of codes, each at most 2^14, are integers that float32 holds in any order.

Convolutions over one and two axes (`nn.Conv1d`, `nn.Conv2d`) are computed by the same code. Left out: transposed convolutions, padding with
anything but zeros, smoothing (an input channel is read by all kernel positions, and seldom follows a norm), scales per row at run time.

Shape suffixes: B rows, C input channels, g groups, O outputs, I inputs of an output, P output positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, EXACT_CHUNK, LayerScales, check_finite, int8_matmul, quantize
from foundation.schemes.scales import Entry, Grid, Layer

Convolution = nn.Conv1d | nn.Conv2d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Geometry:
    """How a convolution moves over its input; one entry per axis that it moves along."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after."""
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, layer: Convolution) -> Geometry:
        """Returns the geometry of a layer that pads with zeros."""
        assert layer.padding_mode == "zeros", layer.padding_mode
        ends = layer._reversed_padding_repeated_twice  # the last axis first; numbers also for padding "same"
        padding = tuple((ends[axis], ends[axis + 1]) for axis in range(len(ends) - 2, -1, -2))
        return cls(tuple(layer.stride), padding, tuple(layer.dilation), layer.groups)


@dataclass(frozen=True)
class ConvolutionScales(LayerScales):
    """The scales of one convolution in w8a8; it has no smoothing vector."""

    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = CONVOLUTIONS

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> ConvolutionScales:
        """Returns the scales of a layer, read from a checkpoint."""
        linear = LayerScales.read(name, tensors, entry)
        if linear.input_smooth is not None:
            raise ValueError(f"{name} is a convolution and has no smoothing")
        return cls(linear.weight_scale, linear.input_scale, linear.weight_bits)

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> ConvolutionScales:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        assert input_scale is not None, "activations have one scale"
        assert smooth_I is None, "convolutions are not smoothed"
        return cls(weight.scale, input_scale, bits)

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        return {**super().entry(), "convolution": True}

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights `[O, C / g, k...]` rounded to the grid, in their shape."""
        return super().on_grid(weight_OI.flatten(1)).reshape(weight_OI.shape)

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights `[O, C / g, k...]`, int8 of their shape."""
        return super().codes(weight_OI.flatten(1)).reshape(weight_OI.shape)

    def module(self, name: str, layer: Layer) -> Int8Convolution:
        """Returns the int8 layer for a float layer."""
        assert isinstance(layer, CONVOLUTIONS), f"{name} is {type(layer).__name__}"
        return int8_layer(name, layer, self)

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns why these scales do not match the layer's grid weights, or None if they match."""
        return super().problem(weight_OI.flatten(1))


def int8_convolution(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Returns the convolution of codes in exact integers, int32 [B, O, size...].

    The inputs of an output must be fewer than 2^17, so that int32 cannot overflow.

    Args:
        x: int8 [B, C, size...].
        weight: int8 [O, C / g, k...].
        geometry: Geometry of the layer.
    """
    x = nn.functional.pad(x, [zeros for ends in reversed(geometry.padding) for zeros in ends])
    (outputs, depth), kernel, groups = weight.shape[:2], weight.shape[2:], geometry.groups
    if depth == 1 and groups > 1 and math.prod(kernel) <= EXACT_CHUNK:
        return _depthwise(x, weight, geometry)
    steps = list(zip(geometry.stride, geometry.dilation, strict=True))
    sizes = [(size - dilation * (k - 1) - 1) // s + 1 for size, k, (s, dilation) in zip(x.shape[2:], kernel, steps, strict=True)]
    total_gPO = torch.zeros(groups, len(x) * math.prod(sizes), outputs // groups, dtype=torch.int32, device=x.device)
    for number, place in enumerate(itertools.product(*(range(k) for k in kernel))):
        starts = [t * dilation for t, (_, dilation) in zip(place, steps, strict=True)]
        seen = tuple(slice(start, start + s * (size - 1) + 1, s) for start, size, (s, _) in zip(starts, sizes, steps, strict=True))
        x_gPC = x[(slice(None), slice(None), *seen)].movedim(1, -1).reshape(-1, groups, depth).transpose(0, 1)
        total_gPO += _products(x_gPC, weight.flatten(2)[:, :, number].reshape(groups, -1, depth))
    return total_gPO.transpose(0, 1).reshape(len(x), *sizes, outputs).movedim(-1, 1)


def _products(a_gPI: Tensor, b_gOI: Tensor) -> Tensor:
    """Returns the product of each group in exact integers, int32 [g, P, O]; arguments are int8."""
    if len(a_gPI) == 1 or a_gPI.shape[2] > EXACT_CHUNK:
        return torch.stack([int8_matmul(a_PI, b_OI) for a_PI, b_OI in zip(a_gPI, b_gOI, strict=True)])
    return torch.bmm(a_gPI.float(), b_gOI.float().transpose(1, 2)).to(torch.int32)  # exact: see `int8_matmul`


def _depthwise(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    convolve = nn.functional.conv1d if x.dim() == 3 else nn.functional.conv2d
    with torch.backends.nnpack.flags(enabled=False):  # it may compute a convolution through a Fourier transform, which is not exact
        y: Tensor = convolve(x.float(), weight.float(), None, geometry.stride, 0, geometry.dilation, geometry.groups)
    return y.to(torch.int32)


class Int8Convolution(nn.Module):
    """A convolution in int8: quantizes the input, convolves codes, rescales once and adds the bias.

    Args:
        name: Module path, for messages.
        weight_codes: int8 codes [O, C / g, k...].
        scales: Scales of the layer.
        bias_O: float32 [O], or None.
        geometry: Geometry of the layer.
    """

    weight_codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    bias: Tensor | None

    def __init__(self, name: str, weight_codes: Tensor, scales: LayerScales, bias_O: Tensor | None, geometry: Geometry) -> None:
        super().__init__()
        self.name, self.geometry = name, geometry
        self.register_buffer("weight_codes", weight_codes)
        self.register_buffer("weight_scale", scales.weight_scale)
        self.register_buffer("input_scale", scales.input_scale)
        self.register_buffer("bias", bias_O)

    @property
    def weight(self) -> Tensor:
        """The weights that the codes stand for, float32: vision models cast images to the dtype of the weight that reads them."""
        return self.weight_codes.float() * self.weight_scale.reshape(-1, *[1] * (self.weight_codes.dim() - 1))

    def codes(self, x: Tensor) -> Tensor:
        """Returns the int8 codes of an input, in the same shape."""
        return quantize(x, self.input_scale, ACTIVATION_LOW, ACTIVATION_HIGH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [B, O, size...] for an input [B, C, size...], in its dtype; scales are applied in float32.

        Raises:
            InputError: The input holds NaN or infinity; the message names the layer.
        """
        check_finite(self.name, x)
        y = int8_convolution(self.codes(x.float()), self.weight_codes, self.geometry).float()
        y = y * per_channel(self.input_scale * self.weight_scale, y)
        return (y if self.bias is None else y + per_channel(self.bias, y)).to(x.dtype)

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        return f"weight={tuple(self.weight_codes.shape)}, {self.geometry}, bias={self.bias is not None}"


def int8_layer(name: str, layer: Convolution, scales: LayerScales) -> Int8Convolution:
    """Returns the int8 layer for a float layer, whose weights need not be on the grid; `layer` is not modified."""
    bias_O = None if layer.bias is None else layer.bias.detach().float()
    return Int8Convolution(name, scales.codes(layer.weight.detach().float()), scales, bias_O, Geometry.of(layer))


def channel_axis(layer: nn.Module) -> int:
    """Returns the axis of the inputs and outputs of a layer that its channels lie on: 1 for a convolution, -1 for a linear layer."""
    return 1 if isinstance(layer, (*CONVOLUTIONS, Int8Convolution)) else -1


def per_channel(values_O: Tensor, y: Tensor) -> Tensor:
    """Returns values [O] in a shape that broadcasts with a tensor [B, O, size...]."""
    return values_O.reshape(-1, *[1] * (y.dim() - 2))
