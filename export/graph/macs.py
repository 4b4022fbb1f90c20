"""Multiply-accumulates of every GEMM in an ONNX graph, at one batch size and sequence length.

    MatMul, Gemm [.., M, K] x [K, N]: elements of the output * K          Conv: elements of the output * (C_in / groups * kernel size)

Shapes are read off a run of the graph in ONNX Runtime, with a Shape node on both inputs and the output of each GEMM. onnx's own shape
inference loses the batch and head axes in Reshape chains where the batch is 1 (seen on BERT), and a shape that is guessed wrongly would
falsify the int8 share without a sign. The price is one forward pass.

Left out: everything that is not a GEMM (LayerNorm, softmax, GELU), below 1 % of a Transformer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from export.graph.onnx import GEMMS, module_of
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.machine.environment import physical_cores

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Gemm:
    """One GEMM of the graph."""

    name: str
    """Path of the torch module of a weight GEMM; name of the node (`<module>/qk`, `<module>/pv`) of an attention product."""
    kind: Literal["weight", "attention"]
    macs: int
    node: str
    """Name of the ONNX node, unique in the graph: what engines report."""


def count_macs(model: Graph, batch: int, sequence: int | None) -> list[Gemm]:
    """Counts the multiply-accumulates of every GEMM.

    Args:
        model: An ONNX file of `export.graph.onnx` or `export.graph.qdq`.
        batch: Rows.
        sequence: Tokens per row; None for images.

    Returns:
        The GEMMs in graph order: those with a weight (patch embedding and head included), and both products of every attention.
    """
    proto = model.load(external=False)
    gemms = [node for node in proto.graph.node if node.op_type in GEMMS]
    constant = _constants(proto.graph)
    shapes = _shapes(proto, model.path.parent, sorted({tensor for node in gemms for tensor in _tensors(node)}), batch, sequence)
    return [_gemm(node, node.input[1] in constant, shapes) for node in gemms]


def _gemm(node: onnx.NodeProto, has_weight: bool, shapes: dict[str, Shape]) -> Gemm:
    first, second, output = (shapes[tensor] for tensor in _tensors(node))
    if node.op_type == "Conv":
        depth = prod(second[1:])  # [C_out, C_in / groups, kernel...]
    else:
        transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        depth = first[0] if transposed else first[-1]
    name = module_of(node) if has_weight else node.name
    return Gemm(name or node.name, "weight" if has_weight else "attention", prod(output) * depth, node.name)


def _tensors(node: onnx.NodeProto) -> tuple[str, str, str]:
    return node.input[0], node.input[1], node.output[0]


def _constants(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of initializers and of what DequantizeLinear, Transpose and Cast make of them."""
    names = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("DequantizeLinear", "Transpose", "Cast") and node.input[0] in names:
            names.add(node.output[0])
    return names


def _shapes(proto: onnx.ModelProto, folder: Path, tensors: list[str], batch: int, sequence: int | None) -> dict[str, Shape]:
    """Runs the graph on made-up rows and returns the shapes of `tensors`; their values are never brought out."""
    feeds = {value.name: _feed(value, {"batch": batch, "sequence": sequence}) for value in proto.graph.input}
    names = [f"macs:{tensor}" for tensor in tensors]
    for tensor, name in zip(tensors, names, strict=True):
        proto.graph.node.append(helper.make_node("Shape", [tensor], [name]))
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = physical_cores()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {tensor: tuple(int(size) for size in shape) for tensor, shape in zip(tensors, session.run(names, feeds), strict=True)}


def _feed(value: onnx.ValueInfoProto, sizes: dict[str, int | None]) -> Array:
    """Returns ones (a legal token id, an unmasked position) of the shape of an input, dynamic axes filled in from `sizes`."""
    shape = []
    for dim in value.type.tensor_type.shape.dim:
        size = dim.dim_value or sizes[dim.dim_param]
        assert size is not None, f"{value.name}: sequence is needed for a text model"
        shape.append(size)
    return np.ones(shape, helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
