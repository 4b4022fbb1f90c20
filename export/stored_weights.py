"""Share of a model's weights that the files of an engine store as integers, counted from their constants.

    integer_weights = weights that are codes of 4 or 8 bits / all weights

Weights are constants with two axes or more that are longer than one: matrices, kernels, and tables of embeddings and positions. Vectors do
not count, nor do scales and zero points. A table that a file holds twice counts twice. This is not the share of int8 arithmetic,
which is in `export.share`: int8 tables, for example, are multiplied as floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx
    import openvino

ONNX_INTEGERS = frozenset({"INT8", "UINT8", "INT4", "UINT4"})
ONNX_SCALED = {"DequantizeLinear": 1, "QuantizeLinear": 1, "MatMulNBits": 2, "GatherBlockQuantized": 2, "GroupQueryAttention": 5}
"""Operators with scales, zero points or (attention) rotary angles among their inputs, and the index of the first such input."""
BLOCKS = "MatMulNBits"
"""Reads codes in padded blocks, two in a byte for 4 bits: the number of weights comes from its attributes."""
OPENVINO_INTEGERS = frozenset({"i8", "u8", "i4", "u4"})
OPENVINO_SCALED = ("Multiply", "Subtract")
"""Operations of an IR that scale or shift codes; the codes are their first input."""
OPENVINO_BETWEEN = ("Convert", "Unsqueeze", "Reshape")


class Weight(NamedTuple):
    """One constant."""

    size: int
    is_integer: bool


def integer_weights(files: Sequence[Path]) -> float | None:
    """Returns the share of the weights in an engine's files that are integers; None where no file is a graph of ONNX or OpenVINO.

    Args:
        files: Files of the engine: .onnx and .xml are read, others are skipped.
    """
    readers = {".onnx": _of_onnx, ".xml": _of_openvino}
    weights = [weight for path in files if path.suffix in readers for weight in readers[path.suffix](path)]
    total = sum(weight.size for weight in weights)
    return sum(weight.size for weight in weights if weight.is_integer) / total if total else None


def _of_onnx(path: Path) -> Iterator[Weight]:
    import onnx

    from foundation.artifacts.graph import Graph

    graph = Graph(path).structure
    scales = {name for node in graph.node if node.op_type in ONNX_SCALED for name in node.input[ONNX_SCALED[node.op_type] :]}
    sizes = {node.input[1]: attribute(node, "N") * attribute(node, "K") for node in graph.node if node.op_type == BLOCKS}
    for tensor in graph.initializer:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        if (kind in ONNX_INTEGERS or "FLOAT" in kind) and tensor.name not in scales and _is_matrix(tensor.dims):
            yield Weight(sizes.get(tensor.name, math.prod(tensor.dims)), kind in ONNX_INTEGERS)


def attribute(node: onnx.NodeProto, name: str) -> int:
    """Returns an attribute of an ONNX node that is a number."""
    return next(int(one.i) for one in node.attribute if one.name == name)


def _of_openvino(path: Path) -> Iterator[Weight]:
    import openvino

    for node in openvino.Core().read_model(path).get_ops():
        if node.get_type_name() == "Constant" and _is_matrix(shape := list(node.get_output_shape(0))) and not _scales(node):
            kind = node.get_element_type()
            if kind.is_real() or kind.get_type_name() in OPENVINO_INTEGERS:
                yield Weight(math.prod(shape), not kind.is_real())


def _scales(node: openvino.Node) -> bool:
    """Whether a constant of an IR is a scale or a zero point."""
    for target in (target for value in node.outputs() for target in value.get_target_inputs()):
        kind = target.get_node().get_type_name()
        if (kind in OPENVINO_SCALED and target.get_index() > 0) or (kind in OPENVINO_BETWEEN and _scales(target.get_node())):
            return True
    return False


def _is_matrix(shape: Sequence[int]) -> bool:
    return sum(size > 1 for size in shape) > 1
