"""True int8: integer codes, an exact integer GEMM, one rescale. Used by QAT, export and the torch engine.

Quantization is symmetric (zero-point 0) with float32 scales, rounding half to even. Weights have a scale per output channel. Activations
have one calibrated scale per tensor (scheme w8a8), or a scale per token computed at run time (scheme w8a8-dynamic):

    q_w = clamp(rint(W / s_w), -L, L)            int8 [O, I], L = 127 (8 bits) or 63 (7 bits)
    w8a8           q_x = clamp(rint(x / s_x), -128, 127)                   int8 [N, I], as ONNX QuantizeLinear
                   y   = float32(q_x @ q_w.T) * (s_x * s_w) + b            accumulated in int32, exactly
    w8a8-dynamic   q_x = rint(x / s_n),   s_n = max_i |x_ni| / 127         for the row (token) n
                   y   = float32(q_x @ q_w.T) * s_n * s_w + b

A layer may have a smoothing vector s [I] (SmoothQuant, if no norm can absorb it): x * (1 / s) replaces x, and q_w are the codes of W * s,
which leaves y the same. Layers that read the same tensor share one vector.

Seven bits are for CPUs without VNNI or AMX: their int8 kernels use vpmaddubsw, which adds two uint8 * int8 products in 16 bits with
saturation. 255 * 127 * 2 = 64770 exceeds 32767; 255 * 63 * 2 = 32130 does not, so every sum is exact.

A quantized checkpoint (`foundation.schemes.checkpoint`) stores float weights rounded to the grid, s_w * q_w / s; rint(w * s / s_w) recovers
q_w. s = 1 without smoothing.

Shape suffixes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from foundation.core.errors import InputError
from foundation.machine.environment import NATIVE_INT8
from foundation.schemes.scales import SMALLEST_SCALE, Entry, Grid, Layer, Stored, positive

ACTIVATION_LOW, ACTIVATION_HIGH = -128, 127
EXACT_CHUNK = 1024  # inputs whose products sum to at most 2^24, which float32 holds exactly; see int8_matmul
WRONG_SCALES = "its scales must be positive numbers, one for the input and one for each output"
OFF_GRID = "its weights are not on the grid of its scales: they were changed after quantization"


@dataclass(frozen=True)
class LayerScales:
    """The scales of one linear layer in w8a8."""

    SCHEME: ClassVar[str] = "w8a8"
    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    weight_scale: Tensor
    """float32 [O]."""
    input_scale: Tensor
    """float32 []."""
    weight_bits: int
    """8 or 7."""
    input_smooth: Tensor | None = None
    """float32 [I], positive: the input is divided by it before it is quantized; None for no smoothing."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LayerScales:
        """Returns the scales of a layer, read from a checkpoint."""
        bits, smooth_I = _bits(entry), tensors.get(f"{name}.input_smooth")
        return cls(tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"], bits, smooth_I)

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> LayerScales:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        assert input_scale is not None, "activations have one scale"
        return cls(weight.scale, input_scale, bits, smooth_I)

    def on(self, device: torch.device) -> Self:
        """Returns these scales on a device."""
        smooth_I = None if self.input_smooth is None else self.input_smooth.to(device)
        return replace(self, weight_scale=self.weight_scale.to(device), input_scale=self.input_scale.to(device), input_smooth=smooth_I)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        smooth = {} if self.input_smooth is None else {"input_smooth": self.input_smooth}
        return {"weight_scale": self.weight_scale, "input_scale": self.input_scale, **smooth}

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        return {"weight_bits": self.weight_bits}

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, with the smoothing undone, as the checkpoint stores them."""
        return on_grid_of(weight_OI, self)

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, including their smoothing, int8 `[O, I]`."""
        return _weight_codes(weight_OI, self)

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes: int8, a scale for each output."""
        return Stored(codes_OI.numpy(), self.weight_scale.numpy())

    def module(self, name: str, layer: Layer) -> nn.Module:
        """Returns the int8 layer for a float layer."""
        assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
        return int8_linear(name, layer, self)

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns why these scales do not match the layer's grid weights, or None if they match."""
        sound = self.input_scale.shape == () and positive(self.input_scale)
        return _problem(weight_OI, self) if sound else WRONG_SCALES


@dataclass(frozen=True)
class DynamicScales:
    """The scales of one linear layer in w8a8-dynamic: weight scales only."""

    SCHEME: ClassVar[str] = "w8a8-dynamic"
    LAYERS: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    weight_scale: Tensor
    """float32 [O]."""
    weight_bits: int
    """8 or 7."""
    input_smooth: Tensor | None = None
    """float32 [I], positive: the input is divided by it before it is quantized; None for no smoothing."""

    @classmethod
    def read(cls, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> DynamicScales:
        """Returns the scales of a layer, read from a checkpoint."""
        return cls(tensors[f"{name}.weight_scale"], _bits(entry), tensors.get(f"{name}.input_smooth"))

    @classmethod
    def chosen(cls, weight: Grid, input_scale: Tensor | None, bits: int, group_size: int, smooth_I: Tensor | None) -> DynamicScales:
        """Returns the scales that quantization chose; see `foundation.schemes.scales.Scales`."""
        return cls(weight.scale, bits, smooth_I)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store in `quantization.safetensors`."""
        return {"weight_scale": self.weight_scale, **({} if self.input_smooth is None else {"input_smooth": self.input_smooth})}

    def entry(self) -> Entry:
        """Returns the layer's entry in `quantization.json`."""
        return {"weight_bits": self.weight_bits}

    def on_grid(self, weight_OI: Tensor) -> Tensor:
        """Returns the weights rounded to the grid, with the smoothing undone, as the checkpoint stores them."""
        return on_grid_of(weight_OI, self)

    def codes(self, weight_OI: Tensor) -> Tensor:
        """Returns the codes of weights, including their smoothing, int8 `[O, I]`."""
        return _weight_codes(weight_OI, self)

    def stored(self, codes_OI: Tensor) -> Stored:
        """Returns how an ONNX graph stores these codes: int8, a scale for each output."""
        return Stored(codes_OI.numpy(), self.weight_scale.numpy())

    def module(self, name: str, layer: Layer) -> DynamicInt8Linear:
        """Returns the int8 layer for a float layer."""
        assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
        return DynamicInt8Linear(name, self.codes(layer.weight.detach().float()), self, _float_bias(layer))

    def problem(self, weight_OI: Tensor) -> str | None:
        """Returns why these scales do not match the layer's grid weights, or None if they match."""
        return _problem(weight_OI, self)


@functools.cache
def has_vnni() -> bool:
    """Whether this CPU has VNNI or AMX, which accumulate int8 products in int32 without saturating at 16 bits; False if unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and not NATIVE_INT8.isdisjoint(_cpu_flags(cpuinfo.read_text(encoding="utf-8", errors="replace")))


def _cpu_flags(cpuinfo: str) -> list[str]:
    """Returns the flags of the first processor in a /proc/cpuinfo text."""
    return next((line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])


def weight_bits(device: str) -> Literal[7, 8]:
    """Returns the weight bits that every int8 kernel of `device` multiplies exactly: 7 for a CPU without VNNI or AMX, else 8.

    Without VNNI and AMX, kernels use vpmaddubsw, whose sums of two products saturate at 32767: 255 * 63 * 2 = 32130 fits, 255 * 127 * 2
    does not.

    Args:
        device: "cpu" (the CPU of this machine) or "cuda".
    """
    return 8 if device != "cpu" or has_vnni() else 7


def levels(bits: int) -> int:
    """Returns the largest weight code for a bit width: 127 for 8, 63 for 7."""
    return (1 << (bits - 1)) - 1


def quantize(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Returns the int8 codes of `x`: rint(x / scale), saturated to [low, high].

    Args:
        x: float32, any shape.
        scale: float32, positive, broadcastable to the shape of `x`.
        low: Smallest code, at least -128.
        high: Largest code, at most 127.
    """
    return torch.round(x / scale).clamp_(low, high).to(torch.int8)


def weight_scale(weight_OI: Tensor, largest: int) -> Tensor:
    """Returns the scales that map the largest |weight| of each output channel to the code `largest`, float32 [O].

    A channel of zeros gets the scale 1, to avoid division by 0.
    """
    magnitude_O = weight_OI.abs().amax(dim=1) if weight_OI.shape[1] else weight_OI.new_zeros(weight_OI.shape[0])
    scale_O = (magnitude_O / largest).clamp(min=SMALLEST_SCALE)
    return torch.where(magnitude_O == 0, torch.ones_like(scale_O), scale_O)


def int8_matmul(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    """Returns `a @ b.T` in exact integers, int32 [N, O]. I must be below 2^17, so that int32 cannot overflow.

    On CUDA and on CPUs with VNNI or AMX this is `torch._int_mm`. Elsewhere that kernel is 20 times slower than a float GEMM, so the codes
    are multiplied as float32 in chunks of 1024 inputs. That is exact: a product of two codes is an integer of magnitude at most
    128 * 128 = 2^14, so every partial sum of the 2^10 products of a chunk, in any order and with or without fused multiply-add, is an
    integer of magnitude at most 2^24, which float32 represents exactly. The chunks are added in int32.

    Args:
        a_NI: int8 [N, I].
        b_OI: int8 [O, I].
    """
    (n, inputs), outputs = a_NI.shape, b_OI.shape[0]
    total_NO = torch.zeros(n, outputs, dtype=torch.int32, device=a_NI.device)
    if n == 0 or inputs == 0 or outputs == 0:
        return total_NO
    if a_NI.is_cuda or (a_NI.device.type == "cpu" and has_vnni()):
        return _int_mm(a_NI, b_OI)
    for start in range(0, inputs, EXACT_CHUNK):
        part = slice(start, start + EXACT_CHUNK)
        total_NO += (a_NI[:, part].float() @ b_OI[:, part].float().T).to(torch.int32)
    return total_NO


def _int_mm(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    n, outputs = a_NI.shape[0], b_OI.shape[0]
    if a_NI.is_cuda:  # cuBLAS requires more than 16 rows and multiples of 8 inputs and outputs; zeros do not change the sums
        rows, inputs = max(0, 17 - n), -a_NI.shape[1] % 8
        a_NI = nn.functional.pad(a_NI, (0, inputs, 0, rows))
        b_OI = nn.functional.pad(b_OI, (0, inputs, 0, -outputs % 8))
    elif a_NI.shape[1] == 1:  # the CPU kernel misreads the strides of a single column and returns uninitialized memory
        a_NI, b_OI = nn.functional.pad(a_NI, (0, 1)), nn.functional.pad(b_OI, (0, 1))
    return torch._int_mm(a_NI.contiguous(), b_OI.contiguous().T)[:n, :outputs]


class QuantizedLinear(nn.Module):
    """Base of the quantized linear layers: holds codes, scales and bias as buffers.

    Args:
        name: Module path, for messages.
        weight_OI: Codes [O, I], of any dtype.
        bias_O: float32 [O], or None.
        scales: Further buffers by name; None for an absent one.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, bias_O: Tensor | None, scales: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self.name = name
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", weight_OI)
        for key, value in scales.items():
            self.register_buffer(key, value)
        self.register_buffer("bias", bias_O)

    def finished(self, y_NO: Tensor, x: Tensor) -> Tensor:
        """Adds the bias to the rescaled products float32 [N, O]; returns the output [..., O] in the leading shape and dtype of `x`."""
        y_NO = y_NO if self.bias is None else y_NO + self.bias
        return y_NO.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Int8Linear(QuantizedLinear):
    """A linear layer in int8: quantizes the input, runs an int8 GEMM, rescales once and adds the bias.

    Args:
        name: Module path, for messages.
        weight_OI: int8 codes [O, I].
        scales: Scales of the layer.
        bias_O: float32 [O], or None.
    """

    input_scale: Tensor
    input_smooth: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, scales: LayerScales, bias_O: Tensor | None) -> None:
        buffers = {"weight_scale": scales.weight_scale, "input_scale": scales.input_scale, "input_smooth": scales.input_smooth}
        super().__init__(name, weight_OI, bias_O, buffers)

    def codes(self, x: Tensor) -> Tensor:
        """Returns the int8 codes of an input, in the same shape."""
        return quantize(_divided(x, self.input_smooth), self.input_scale, ACTIVATION_LOW, ACTIVATION_HIGH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the dtype of the input; scales are applied in float32.

        Raises:
            InputError: The input holds NaN or infinity; the message names the layer.
        """
        return self.rescaled(self.accumulated(x), x)

    def accumulated(self, x: Tensor) -> Tensor:
        """Returns the exact sums of products of codes, int32 `[N, O]`; raises InputError if the input holds NaN or infinity."""
        check_finite(self.name, x)
        return int8_matmul(self.codes(x.float()).reshape(-1, self.in_features), self.weight)

    def rescaled(self, accumulated_NO: Tensor, x: Tensor) -> Tensor:
        """Returns the output [..., O] of sums of products of codes, int32 `[N, O]`, in the leading shape and dtype of `x`."""
        return self.finished(accumulated_NO.float() * (self.input_scale * self.weight_scale), x)


class DynamicInt8Linear(QuantizedLinear):
    """A linear layer in int8 that computes the scale of each input token at run time.

    Args:
        name: Module path, for messages.
        weight_OI: int8 codes [O, I].
        scales: Scales of the layer.
        bias_O: float32 [O], or None.
    """

    input_smooth: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, scales: DynamicScales, bias_O: Tensor | None) -> None:
        super().__init__(name, weight_OI, bias_O, {"weight_scale": scales.weight_scale, "input_smooth": scales.input_smooth})

    def divided(self, x: Tensor) -> Tensor:
        """Returns an input [..., I] divided by the smoothing vector: what is quantized."""
        return _divided(x, self.input_smooth)

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the int8 codes of an input [..., I], and the scale of each token, float32 [..., 1]."""
        x = self.divided(x)
        scale = token_scale(x)
        return quantize(x, scale, -ACTIVATION_HIGH, ACTIVATION_HIGH), scale

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the dtype of the input; scales are applied in float32.

        Raises:
            InputError: The input holds NaN or infinity; the message names the layer.
        """
        check_finite(self.name, x)
        codes, scale = self.codes(x.float())
        accumulated = int8_matmul(codes.reshape(-1, self.in_features), self.weight)
        return self.finished(accumulated.float() * scale.reshape(-1, 1) * self.weight_scale, x)


def token_scale(x: Tensor) -> Tensor:
    """Returns the scales that map the largest |x| of each token to the code 127, float32 [..., 1]; `x` is float32 [..., I]."""
    return (x.abs().amax(dim=-1, keepdim=True) / ACTIVATION_HIGH).clamp(min=SMALLEST_SCALE)


def check_finite(name: str, x: Tensor) -> None:
    """Raises an InputError that names the layer if its input holds NaN or infinity, which have no code."""
    if isinstance(x, FakeTensor):  # a model that is planned has no values
        return
    # The sum is cheap, and not finite if any value is not. Large finite values may overflow in it, hence the second check.
    if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
        raise InputError(name, "the input of this quantized layer holds NaN or infinity, which have no code", remedy="check the model")


def on_grid(weight_OI: Tensor, scale_O: Tensor, largest: int) -> Tensor:
    """Returns weights rounded to the grid of their scales (scale times integer), float32 [O, I]."""
    return quantize(weight_OI, scale_O[:, None], -largest, largest).float() * scale_O[:, None]


def on_grid_of(weight_OI: Tensor, scales: LayerScales | DynamicScales) -> Tensor:
    """Returns a layer's weights as a checkpoint stores them: rounded to the grid of its scales, with the smoothing undone."""
    grid_OI = on_grid(_smoothed(weight_OI, scales), scales.weight_scale, levels(scales.weight_bits))
    return grid_OI if scales.input_smooth is None else grid_OI / scales.input_smooth


def int8_linear(name: str, linear: nn.Linear, scales: LayerScales) -> Int8Linear:
    """Returns the int8 layer for a float layer, whose weights need not be on the grid; `linear` is not modified."""
    return Int8Linear(name, scales.codes(linear.weight.detach().float()), scales, _float_bias(linear))


def _weight_codes(weight_OI: Tensor, scales: LayerScales | DynamicScales) -> Tensor:
    largest = levels(scales.weight_bits)
    return quantize(_smoothed(weight_OI, scales), scales.weight_scale[:, None], -largest, largest)


def _float_bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach().float()


def _divided(x: Tensor, smooth_I: Tensor | None) -> Tensor:
    return x if smooth_I is None else x * smooth_I.reciprocal()  # multiplies by the reciprocal, like the Mul of the ONNX graph


def _smoothed(weight_OI: Tensor, scales: LayerScales | DynamicScales) -> Tensor:
    return weight_OI if scales.input_smooth is None else weight_OI * scales.input_smooth


def _bits(entry: Entry) -> int:
    if entry["weight_bits"] not in (7, 8):
        raise ValueError("weight_bits must be 7 or 8")
    return int(entry["weight_bits"])


def _problem(weight_OI: Tensor, scales: LayerScales | DynamicScales) -> str | None:
    """Returns why scales and weights do not match (shapes, signs, or weights off the grid), or None if they do."""
    smooth_I, (outputs, inputs) = scales.input_smooth, weight_OI.shape
    sound = scales.weight_scale.shape == (outputs,) and (smooth_I is None or smooth_I.shape == (inputs,))
    if not sound or not positive(scales.weight_scale, *([] if smooth_I is None else [smooth_I, smooth_I.reciprocal()])):
        return WRONG_SCALES
    steps_OI = _smoothed(weight_OI.float(), scales) / scales.weight_scale[:, None]
    return None if are_codes(steps_OI, _weight_codes(weight_OI.float(), scales), weight_OI.dtype) else OFF_GRID


def are_codes(steps_OI: Tensor, codes_OI: Tensor, stored: torch.dtype) -> bool:
    """Whether weights, divided by their scales, are their codes up to the rounding of the dtype that they are stored in.

    A cast to a 16-bit type changes a weight by at most half a unit in the last place: in bfloat16 127 * 2^-8 = 0.496 codes, below 0.5.
    """
    tolerance = 127 * torch.finfo(stored).eps / 2 + 1e-3
    return bool(((steps_OI - codes_OI.float()).abs() <= tolerance).all())  # NaN is never near
