"""Parity: does an engine compute what torch computed? A gate of export.

Per layer, on the engine's own tensors. The file that ships is opened once more with three tensors of every quantized layer as outputs: its
float input x, its integer codes q, its product y before the bias. Nothing of the engine's integer path is replaced. Then

    q = clamp(rint(x / s_x), -128, 127)          as `foundation.schemes.int8` computes it from the same x
    rint(y / (s_x * s_w)) = q @ Wq.T             exactly, from the engine's own q; for a convolution q * Wq

A code may be off by one where x / s_x lies within 1e-3 of a rounding boundary: there, dividing by s and multiplying by 1/s may differ. A
sum may never be off: kernels that saturate at 16 bits (int8 without VNNI, weights of 8 bits) are found here.

End to end, the predictions on selection rows (`export.parity.rows`) are compared by `foundation.measure.agreement`, within the limits that
`verify` and the server have too; never those on evaluation rows, as what fails is left out. The largest difference is reported, not gated:
one rounding that falls the other way is a visible step. How often that happens differs between modes of one engine: OpenVINO's dynamic mode
rounds x / s + 128, which is 1.5e-5 coarse, and flips 15 codes in a row of 128 tokens where its static mode flips none.

The products of attention and the residuals that are int8 are compared in the same way (`export.parity.products`).

Left out: layers that stay float; only the end-to-end figures cover them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from export.graph.onnx import GEMMS, module_of
from export.graph.qdq import is_transposed
from foundation.artifacts import exported
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, int8_matmul, quantize
from foundation.schemes.int8_convolution import Geometry, int8_convolution

BOUNDARY = 1e-3


class ParityError(RuntimeError):
    """An engine does not compute what torch computed; one line: the first layer that diverges, or the predictions."""


@dataclass(frozen=True)
class QuantizedGemm:
    """One int8 layer of a Q/DQ graph: the names of its tensors, and its constants."""

    layer: str
    """Path of the torch module."""
    input: str
    codes: str
    output: str
    input_scale: NDArray[np.float32]
    """float32 []."""
    weight_OI: NDArray[np.int8]
    """int8 [O, I]; [O, C / groups, k...] of a convolution."""
    weight_scale: NDArray[np.float32]
    """float32 [O]."""
    bias: NDArray[np.float32]
    """Bias of the node itself, float32 [O]; zeros for MatMul."""
    geometry: Geometry | None = None
    """Geometry of a convolution; None for a linear layer."""

    @property
    def tensors(self) -> tuple[str, str, str]:
        """Names of input, codes and output."""
        return self.input, self.codes, self.output


@dataclass(frozen=True)
class LayerParity:
    """How the integers of one layer compare."""

    layer: str
    codes: int
    """Number of input codes compared."""
    different: int
    """Codes that differ from torch."""
    allowed: int
    """Differing codes whose float value lies on a rounding boundary, off by one."""
    sums: int
    """Number of integer sums compared."""
    wrong_sums: int
    """Sums that are not the product of the engine's own codes."""

    @property
    def passed(self) -> bool:
        """Whether every difference is allowed."""
        return self.different == self.allowed and self.wrong_sums == 0


def quantized_gemms(model: Graph) -> list[QuantizedGemm]:
    """Returns the int8 layers of a Q/DQ model of `export.graph.qdq`, in graph order; the products of attention are not layers."""
    graph = model.load().graph
    producer = {output: node for node in graph.node for output in node.output}
    constant = {tensor.name: tensor for tensor in graph.initializer}
    return [
        _gemm(node, producer, constant)
        for node in graph.node
        if node.op_type in GEMMS
        and _dequantizes(producer, node.input[0])
        and _dequantizes(producer, node.input[1])
        and producer[node.input[1]].input[0] in constant
    ]


def compare_layer(gemm: QuantizedGemm, x: Array, codes: Array, y: Array) -> LayerParity:
    """Compares one layer.

    Args:
        gemm: The layer.
        x: Its float input in the engine, float32 [..., I]; [B, C, size...] of a convolution.
        codes: The engine's codes of it, int8 of its shape.
        y: The engine's product, float32 [..., O]; [B, O, size...] of a convolution.
    """
    different, allowed = compare_codes(x, codes, gemm.input_scale)
    weight = torch.from_numpy(gemm.weight_OI)
    if gemm.geometry is None:
        flat = torch.from_numpy(np.ascontiguousarray(codes.reshape(-1, codes.shape[-1])))
        sums = int8_matmul(flat, weight).numpy().astype(np.float64).reshape(y.shape)
    else:
        found = int8_convolution(torch.from_numpy(np.ascontiguousarray(codes)), weight, gemm.geometry)
        sums, y = (np.moveaxis(values, 1, -1) for values in (found.numpy().astype(np.float64), y))
    return LayerParity(gemm.layer, codes.size, different, allowed, sums.size, int((_recovered(gemm, y, sums) != 0).sum()))


def compare_codes(x: Array, codes: Array, scale: NDArray[np.float32]) -> tuple[int, int]:
    """Returns how many codes of a tensor differ from torch's, and how many of these lie on a rounding boundary, off by one.

    Args:
        x: The float tensor in the engine, float32.
        codes: The engine's codes of it, int8 of its shape.
        scale: float32 [].
    """
    inputs = torch.from_numpy(np.ascontiguousarray(x))
    expected = quantize(inputs, torch.tensor(float(scale)), ACTIVATION_LOW, ACTIVATION_HIGH).numpy()
    steps = x.astype(np.float64) / float(scale)
    off = codes.astype(np.int16) - expected
    on_boundary = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) <= BOUNDARY
    return int((off != 0).sum()), int((on_boundary & (np.abs(off) == 1)).sum())


def compare_layers(gemms: Sequence[QuantizedGemm], tensors: Mapping[str, Array]) -> list[LayerParity]:
    """Compares every layer on the tensors that an engine was probed for."""
    return [compare_layer(gemm, *(tensors[name] for name in gemm.tensors)) for gemm in gemms]


def check_layers(name: str, layers: Sequence[LayerParity]) -> None:
    """Raises where the integers of an engine are wrong.

    Args:
        name: Names of build, engine and mode, for the message.
        layers: What `compare_layers` gave; empty for a float engine.

    Raises:
        ParityError: Names the first layer that diverges.
    """
    first = next((layer for layer in layers if not layer.passed), None)
    if first is not None:
        raise ParityError(f"parity: {name}: {first.layer} is the first layer to diverge from torch: {_what(first)}")


def as_rows(layers: Sequence[LayerParity]) -> tuple[exported.LayerParity, ...]:
    """Returns the comparison of layers for export.json."""
    return tuple(exported.LayerParity(**asdict(layer)) for layer in layers)


def _what(layer: LayerParity) -> str:
    if layer.different != layer.allowed:
        return f"{layer.different} of {layer.codes} input codes differ, {layer.allowed} of them at a rounding boundary"
    return (
        f"{layer.wrong_sums} of {layer.sums} integer sums are wrong although the codes are right; "
        f"this engine's int8 kernel is wrong on this processor: leave the layer in float (stages.quantize.exclude: ['*{layer.layer}']), "
        "leave the engine out of target.engines, or, where its kernels saturate, quantize with weight_bits: 7"
    )


def _recovered(gemm: QuantizedGemm, y: Array, sums: Array) -> Array:
    """Returns the engine's sums minus `sums`, as integers, 0 where float32 cannot distinguish them."""
    scale_O = gemm.input_scale.astype(np.float64) * gemm.weight_scale.astype(np.float64)
    bias_O = gemm.bias.astype(np.float64)
    off = (y.astype(np.float64) - bias_O) / scale_O - sums
    # y went through the sum as float32, the product of the scales, a multiplication and the bias: each rounds by 2^-24 of its result
    slack = 2.0**-22 * (np.abs(sums) + np.abs(bias_O / scale_O) + np.abs(y / scale_O))
    return np.where(np.abs(off) <= slack, 0, np.rint(off))


def _dequantizes(producer: Mapping[str, onnx.NodeProto], tensor: str) -> bool:
    return tensor in producer and producer[tensor].op_type == "DequantizeLinear"


def _gemm(node: onnx.NodeProto, producer: Mapping[str, onnx.NodeProto], constant: Mapping[str, onnx.TensorProto]) -> QuantizedGemm:
    activation, weight = producer[producer[node.input[0]].input[0]], producer[node.input[1]]
    codes, scale = (numpy_helper.to_array(constant[name]) for name in weight.input[:2])
    transposed = is_transposed(node)
    bias = numpy_helper.to_array(constant[node.input[2]]) if len(node.input) > 2 else np.zeros(len(scale), np.float32)
    geometry = _geometry(node) if node.op_type == "Conv" else None
    return QuantizedGemm(
        layer=module_of(node) or node.name,
        input=activation.input[0],
        codes=activation.output[0],
        output=node.output[0],
        input_scale=np.array(numpy_helper.to_array(constant[activation.input[1]]), np.float32),
        weight_OI=np.array(codes if transposed else codes.T, order="C"),
        weight_scale=scale,
        bias=bias,
        geometry=geometry,
    )


def _geometry(node: onnx.NodeProto) -> Geometry:
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert values.get("auto_pad", b"NOTSET") == b"NOTSET", node.name
    pads = values["pads"]
    padding = tuple(zip(pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True))
    return Geometry(tuple(values["strides"]), padding, tuple(values["dilations"]), values["group"])
