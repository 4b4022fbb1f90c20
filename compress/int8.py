"""True int8: integer codes, an exact integer GEMM, one rescale. QAT, export and the torch engine share what is here.

Symmetric, zero-point 0, float32 scales, round half to even. Weights per output channel, activations per tensor:

    q_x = clamp(rint(x / s_x), -128, 127)        int8 [N, I], as ONNX QuantizeLinear
    q_w = clamp(rint(W / s_w), -L, L)            int8 [O, I], L = 127 (8 bits) or 63 (7 bits)
    y   = float32(q_x @ q_w.T) * (s_x * s_w) + b accumulated in int32, exactly

A layer may have a smoothing vector s [I] (SmoothQuant, where no norm can absorb it): x * (1 / s) takes the place of x, and q_w are the
codes of W * s, so that y means the same. Layers that read one tensor share one vector.

Seven bits are for processors without VNNI or AMX: their int8 kernels multiply with vpmaddubsw, which adds two products of a uint8 and an
int8 in 16 bits with saturation. 255 * 127 * 2 = 64770 does not fit into 32767; 255 * 63 * 2 = 32130 does, so every sum is exact.

A quantized checkpoint keeps its float weights rounded to the grid (s_w * q_w / s, from which rint(w * s / s_w) gives q_w back; s = 1
without smoothing) in model.safetensors, the scales in `quantization.safetensors` and the rest in `quantization.json`.

Tensor names carry their shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.artifact import write_json
from compress.environment import NATIVE_INT8
from compress.errors import InputError

ACTIVATION_LOW, ACTIVATION_HIGH = -128, 127
SMALLEST_SCALE = 2.0**-63  # the product of two scales stays a normal float32 number, 2^-126 or more
EXACT_CHUNK = 1024  # inputs whose products of codes sum to 2^24 at most; see int8_matmul
QUANTIZATION_JSON, QUANTIZATION_TENSORS = "quantization.json", "quantization.safetensors"


@dataclass(frozen=True)
class LayerScales:
    """The scales of one quantized linear layer."""

    weight_scale: Tensor
    """float32 [O]."""
    input_scale: Tensor
    """float32 []."""
    weight_bits: int
    """8 or 7."""
    input_smooth: Tensor | None = None
    """float32 [I], positive: what the input is divided by before it is quantized; None for nothing."""


@functools.cache
def has_vnni() -> bool:
    """Whether this processor multiplies int8 into int32 without saturating at 16 bits: VNNI or AMX. False where Linux does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and not NATIVE_INT8.isdisjoint(_cpu_flags(cpuinfo.read_text(encoding="utf-8", errors="replace")))


def _cpu_flags(cpuinfo: str) -> list[str]:
    """Returns the flags of the first processor in the text of /proc/cpuinfo."""
    return next((line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])


def weight_bits(device: str) -> Literal[7, 8]:
    """Returns the bits of a weight that every kernel of `device` multiplies exactly: 7 for a CPU without VNNI or AMX, else 8.

    Without them int8 kernels use vpmaddubsw, whose sums of two products saturate at 32767: 255 * 63 * 2 = 32130 fits, 255 * 127 * 2 not.

    Args:
        device: "cpu" (this processor is meant) or "cuda".
    """
    return 8 if device != "cpu" or has_vnni() else 7


def levels(bits: int) -> int:
    """Returns the largest weight code of a bit width: 127 for 8, 63 for 7."""
    return (1 << (bits - 1)) - 1


def quantize(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Returns the int8 codes of `x`: rint(x / scale), saturated to [low, high].

    Args:
        x: float32, any shape.
        scale: float32, positive, of a shape that broadcasts with `x`.
        low: Smallest code, at least -128.
        high: Largest code, at most 127.
    """
    return torch.round(x / scale).clamp_(low, high).to(torch.int8)


def weight_scale(weight_OI: Tensor, largest: int) -> Tensor:
    """Returns the scale of each output channel that maps its largest weight to the code `largest`, float32 [O].

    A channel of zeros gets the scale 1, so that nothing is ever divided by 0.
    """
    magnitude_O = weight_OI.abs().amax(dim=1) if weight_OI.shape[1] else weight_OI.new_zeros(weight_OI.shape[0])
    scale_O = (magnitude_O / largest).clamp(min=SMALLEST_SCALE)
    return torch.where(magnitude_O == 0, torch.ones_like(scale_O), scale_O)


def int8_matmul(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    """Returns `a @ b.T` in exact integers, int32 [N, O]; for fewer than 2^17 inputs, where int32 itself ends.

    On CUDA and on processors with VNNI or AMX this is `torch._int_mm`. Elsewhere that kernel is 20 times slower than a float GEMM, so the
    codes are multiplied as float32 in chunks of 1024 inputs. That is exact: a product of two codes is an integer of at most
    128 * 128 = 2^14 in size, so any sum of some of the 2^10 products of a chunk, in whatever order and with whatever fused
    multiply-adds, is an integer of at most 2^24 in size, and float32 holds all of those. The chunks are added in int32.

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
    if a_NI.is_cuda:  # cuBLAS takes more than 16 rows, and inputs and outputs in multiples of 8; zeros change nothing
        rows, inputs = max(0, 17 - n), -a_NI.shape[1] % 8
        a_NI = nn.functional.pad(a_NI, (0, inputs, 0, rows))
        b_OI = nn.functional.pad(b_OI, (0, inputs, 0, -outputs % 8))
    elif a_NI.shape[1] == 1:  # its CPU kernel misreads the strides of a single column and returns memory that was never written
        a_NI, b_OI = nn.functional.pad(a_NI, (0, 1)), nn.functional.pad(b_OI, (0, 1))
    return torch._int_mm(a_NI.contiguous(), b_OI.contiguous().T)[:n, :outputs]


class Int8Linear(nn.Module):
    """A linear layer that multiplies integers: quantize the input, int8 GEMM, one rescale, bias.

    Args:
        name: Module path, for messages.
        weight_OI: int8 codes [O, I].
        scales: Scales of the layer.
        bias_O: float32 [O], or None.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_smooth: Tensor | None
    bias: Tensor | None

    def __init__(self, name: str, weight_OI: Tensor, scales: LayerScales, bias_O: Tensor | None) -> None:
        super().__init__()
        self.name = name
        self.out_features, self.in_features = weight_OI.shape
        self.register_buffer("weight", weight_OI)
        self.register_buffer("weight_scale", scales.weight_scale)
        self.register_buffer("input_scale", scales.input_scale)
        self.register_buffer("input_smooth", scales.input_smooth)
        self.register_buffer("bias", bias_O)

    def codes(self, x: Tensor) -> Tensor:
        """Returns the int8 codes of an input, of its shape."""
        if self.input_smooth is not None:
            x = x * self.input_smooth.reciprocal()  # what the Mul of the ONNX graph does
        return quantize(x, self.input_scale, ACTIVATION_LOW, ACTIVATION_HIGH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I], in the type of the input; computed in float32.

        Raises:
            InputError: The input holds NaN or infinity; names the layer.
        """
        # A sum is cheap and is not finite where any value is not; that of large finite values may overflow, hence the second look.
        if not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
            raise InputError(
                f"{self.name}: the input of this int8 layer holds NaN or infinity, which have no integer code; check the model"
            )
        accumulated = int8_matmul(self.codes(x.float()).reshape(-1, self.in_features), self.weight)
        y = accumulated.float() * (self.input_scale * self.weight_scale)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def on_grid(weight_OI: Tensor, scale_O: Tensor, largest: int) -> Tensor:
    """Returns weights rounded to the grid of their scales: scale times integer, float32 [O, I]."""
    return quantize(weight_OI, scale_O[:, None], -largest, largest).float() * scale_O[:, None]


def on_grid_of(weight_OI: Tensor, scales: LayerScales) -> Tensor:
    """Returns the weights that a checkpoint keeps of a layer: on the grid of its scales, its smoothing taken out again."""
    grid_OI = on_grid(_smoothed(weight_OI, scales), scales.weight_scale, levels(scales.weight_bits))
    return grid_OI if scales.input_smooth is None else grid_OI / scales.input_smooth


def int8_linear(name: str, linear: nn.Linear, scales: LayerScales) -> Int8Linear:
    """Returns the integer form of a float layer, whose weights need not be on the grid; the layer itself stays as it is."""
    largest, bias_O = levels(scales.weight_bits), None if linear.bias is None else linear.bias.detach().float()
    codes_OI = quantize(_smoothed(linear.weight.detach().float(), scales), scales.weight_scale[:, None], -largest, largest)
    return Int8Linear(name, codes_OI, scales, bias_O)


def _smoothed(weight_OI: Tensor, scales: LayerScales) -> Tensor:
    return weight_OI if scales.input_smooth is None else weight_OI * scales.input_smooth


def save_quantization(folder: Path, layers: Mapping[str, LayerScales], float_layers: Mapping[str, str]) -> None:
    """Writes `quantization.json` and `quantization.safetensors`.

    Args:
        folder: Checkpoint folder; its model.safetensors holds the weights of `layers` on their grids.
        layers: Scales by module path.
        float_layers: For each linear layer that stays float, the reason.
    """
    bits = {scales.weight_bits for scales in layers.values()}
    document = {
        "schema": 1,
        "scheme": "w8a8",
        "weight_bits": bits.pop() if len(bits) == 1 else None,
        "layers": {name: {"weight_bits": scales.weight_bits} for name, scales in layers.items()},
        "float_layers": dict(float_layers),
    }
    tensors = {f"{name}.weight_scale": scales.weight_scale.contiguous() for name, scales in layers.items()}
    tensors |= {f"{name}.input_scale": scales.input_scale.contiguous().clone() for name, scales in layers.items()}
    smooths = {name: scales.input_smooth for name, scales in layers.items() if scales.input_smooth is not None}
    tensors |= {f"{name}.input_smooth": smooth_I.contiguous().clone() for name, smooth_I in smooths.items()}
    save_file(tensors, folder / QUANTIZATION_TENSORS)
    write_json(folder / QUANTIZATION_JSON, document)


def load_quantization(folder: Path) -> tuple[dict[str, LayerScales], dict[str, str]]:
    """Returns the scales by module path, and the reasons of the layers that stay float.

    Raises:
        InputError: A file is missing or damaged, or of another version.
    """
    try:
        document: dict[str, Any] = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
        tensors = load_file(folder / QUANTIZATION_TENSORS)
        if (document["schema"], document["scheme"]) != (1, "w8a8"):
            raise ValueError(f"schema {document['schema']}, scheme {document['scheme']}; schema 1, scheme w8a8 is what this version reads")
        layers = {
            name: LayerScales(
                tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"], entry["weight_bits"], tensors.get(f"{name}.input_smooth")
            )
            for name, entry in document["layers"].items()
        }
        if any(scales.weight_bits not in (7, 8) for scales in layers.values()):
            raise ValueError("weight_bits other than 7 and 8")
        return layers, dict(document["float_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{folder}: {QUANTIZATION_JSON} and {QUANTIZATION_TENSORS} cannot be used ({problem}); quantize again") from error


def apply_quantization(model: nn.Module, folder: Path) -> None:
    """Replaces the quantized linear layers of a model that was loaded in float by `Int8Linear`, in place.

    Args:
        model: Model with the grid weights of the checkpoint.
        folder: The checkpoint.

    Raises:
        InputError: Files are damaged, or the scales do not belong to the weights.
    """
    layers, _ = load_quantization(folder)
    modules = dict(model.named_modules())
    for name, scales in layers.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            raise InputError(f"{folder}: {QUANTIZATION_JSON} names {name}, which is no linear layer of the model; quantize again")
        _check_scales(linear, scales, f"{folder}: {name}")
        layer = int8_linear(name, linear, scales)
        _check_grid(linear.weight.detach(), layer.weight, scales, f"{folder}: {name}")
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, layer)


def _check_scales(linear: nn.Linear, scales: LayerScales, where: str) -> None:
    smooth_I = scales.input_smooth
    sound = scales.weight_scale.shape == (linear.out_features,) and scales.input_scale.shape == ()
    sound = sound and (smooth_I is None or smooth_I.shape == (linear.in_features,))
    given = [scales.weight_scale, scales.input_scale, *([] if smooth_I is None else [smooth_I, smooth_I.reciprocal()])]
    if not sound or not all(bool((scale.isfinite() & (scale > 0)).all()) for scale in given):
        raise InputError(f"{where}: its scales are no positive numbers, one for the input and one for each output; quantize again")


def _check_grid(weight_OI: Tensor, codes_OI: Tensor, scales: LayerScales, where: str) -> None:
    """Checks that weights are on the grid of their scales; anything else means that the two were not written together."""
    # A cast to a shorter type moves a weight by half a unit in the last place: bfloat16 by 127 * 2^-8 = 0.496 codes, still below a half.
    tolerance = 127 * torch.finfo(weight_OI.dtype).eps / 2 + 1e-3
    steps_OI = _smoothed(weight_OI.float(), scales) / scales.weight_scale[:, None]
    if not bool(((steps_OI - codes_OI.float()).abs() <= tolerance).all()):  # written so that NaN fails too
        raise InputError(f"{where}: its weights are not on the grid of its scales: they were changed after quantization; quantize again")
