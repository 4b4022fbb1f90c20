"""Parity of dynamic int8, layer by layer: does the graph of ONNX Runtime quantize every token as torch does, and multiply integers?

As in `export.parity.parity`, on the engine's own tensors: the float input x of a layer, its codes q, its product y before the bias. Then

    q = rint(x / s),   s = max(max |x| / 127, 2^-63) over the token      as `foundation.schemes.int8` computes it from the same x
    rint(y / (s * t)) = q @ Wq.T                                         exactly, from the engine's own q

with the same allowance for codes on a rounding boundary, and none for sums.

Left out: OpenVINO, which does not show the codes that it makes by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from export.graph.onnx import module_of
from export.parity.parity import BOUNDARY, LayerParity
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.schemes.int8 import ACTIVATION_HIGH, int8_matmul, quantize, token_scale


@dataclass(frozen=True)
class DynamicGemm:
    """One layer of a graph of `export.graph.qdq_schemes.insert_dynamic`: the names of its tensors, and its constants."""

    layer: str
    """Path of the torch module."""
    input: str
    codes: str
    output: str
    """Before the bias."""
    weight_OI: NDArray[np.int8]
    weight_scale: NDArray[np.float32]
    """float32 [O]."""

    @property
    def tensors(self) -> tuple[str, str, str]:
        """Names of input, codes and output."""
        return self.input, self.codes, self.output


def dynamic_gemms(model: Graph) -> list[DynamicGemm]:
    """Returns the layers that multiply integers, in graph order."""
    graph = model.load().graph
    producer = {output: node for node in graph.node for output in node.output}
    reader = {tensor: node for node in graph.node for tensor in node.input}
    constant = {tensor.name: tensor for tensor in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            moved = producer[producer[node.input[0]].input[0]]  # Cast <- Add(codes, 128)
            rescaled = reader[reader[reader[node.output[0]].output[0]].output[0]]  # Cast -> Mul by s -> Mul by t
            steps = producer[producer[producer[moved.input[0]].input[0]].input[0]]  # Clip <- Round <- Div(x, s)
            weight_OI = np.ascontiguousarray(numpy_helper.to_array(constant[node.input[1]]).T)
            scale_O = numpy_helper.to_array(constant[rescaled.input[1]])
            found.append(DynamicGemm(module_of(node) or node.name, steps.input[0], moved.input[0], rescaled.output[0], weight_OI, scale_O))
    return found


def compare_dynamic(gemm: DynamicGemm, x: Array, codes: Array, y: Array) -> LayerParity:
    """Compares one layer.

    Args:
        gemm: The layer.
        x: What it quantizes, float32 [..., I].
        codes: The engine's codes of it, float32 [..., I].
        y: The engine's product, float32 [..., O].
    """
    inputs = torch.from_numpy(np.ascontiguousarray(x))
    scale = token_scale(inputs)
    expected = quantize(inputs, scale, -ACTIVATION_HIGH, ACTIVATION_HIGH).numpy()
    steps = x.astype(np.float64) / scale.numpy().astype(np.float64)
    off = codes.astype(np.int16) - expected
    on_boundary = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) <= BOUNDARY
    flat = torch.from_numpy(np.ascontiguousarray(codes.reshape(-1, codes.shape[-1]))).to(torch.int8)
    sums = int8_matmul(flat, torch.from_numpy(gemm.weight_OI)).numpy().astype(np.float64).reshape(y.shape)
    away = y.astype(np.float64) / (scale.numpy().astype(np.float64) * gemm.weight_scale.astype(np.float64)) - sums
    # the sum as float32 and two products: each rounds by 2^-24 of its result
    wrong_sums = int((np.where(np.abs(away) <= 2.0**-22 * np.abs(sums), 0, np.rint(away)) != 0).sum())
    allowed = int((on_boundary & (np.abs(off) == 1)).sum())
    return LayerParity(gemm.layer, codes.size, int((off != 0).sum()), allowed, sums.size, wrong_sums)


def compare_all(gemms: Sequence[DynamicGemm], tensors: Mapping[str, Array]) -> list[LayerParity]:
    """Compares every layer on the tensors that an engine was probed for."""
    return [compare_dynamic(gemm, *(tensors[name] for name in gemm.tensors)) for gemm in gemms]
