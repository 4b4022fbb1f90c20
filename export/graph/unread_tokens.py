"""Computes the last layer only for the tokens that the head reads: the same logits for less work.

A head that reads the first token (BERT's pooler, the class token of a ViT, `cls` pooling of embeddings) leaves the other rows of the last
layer unread. Keys and values are needed of all tokens; queries, scores, the attention's output, residual additions, norms and the FFN
of the first tokens only. For S tokens of width D and an FFN of width F that leaves of the multiply-accumulates of the layer

    4 S D^2 + 2 S^2 D + 2 S D F   ->   2 S D^2 + 2 D^2 + 2 S D + 2 D F

about a sixth for F = 4 D. Nothing is approximated: each number that is left is computed from the same numbers as before.

    x [B, S, D] -> ... -> norm [B, S, D] -> Gather 0       the head
    x [B, S, D] -> Slice [0, K) -> ... -> norm [B, K, D] -> Gather 0

From its end to its start the graph is asked which tensors are read only in their first K rows of one axis. An operation that treats the
rows of that axis alike passes the question on to its inputs; after any other one, and after a tensor that somebody reads in full (as keys
and values read x), a Slice is inserted.

Where nothing is gained the graph is left as it is: mean pooling, a tag for each token, a token whose place depends on the padding (the last
one of a causal model).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.graph.nodes import replace_nodes

MOST: Final = 8
"""Tokens that a head may read; what reads more is not a head."""
_ROWWISE: Final = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where", "And", "Or", "Not", "Equal", "Greater", "Less", "IsNaN", "Clip"),
        *("Gelu", "Erf", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Elu", "Selu", "Mish", "Softplus", "HardSwish", "HardSigmoid", "Swish"),
        *("Cast", "Identity", "Sqrt", "Exp", "Log", "Neg", "Abs", "Reciprocal", "Sin", "Cos"),
    }
)
"""Elementwise operations, with inputs that are broadcast."""
Dim = int | str
"""A size, or the name of one that is known when the model runs."""


@dataclass
class KnownGraph:
    """A graph, what is known of its tensors, and which of them have only the rows that are read."""

    shapes: dict[str, list[Dim]]
    constants: dict[str, TensorProto]
    narrowed: dict[str, int] = field(default_factory=dict)
    """Axis of the rows by tensor, of those whose producer computes no others."""

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> KnownGraph:
        """Reads shapes and constants of a graph whose value_info has all of its tensors."""
        typed = (*graph.input, *graph.value_info, *graph.output)
        unknown = (f"unknown {number}" for number in itertools.count())
        shapes = {item.name: [dim.dim_param or dim.dim_value or next(unknown) for dim in item.type.tensor_type.shape.dim] for item in typed}
        constants = {tensor.name: tensor for tensor in graph.initializer}
        return cls(shapes | {name: list(tensor.dims) for name, tensor in constants.items()}, constants)

    def integers(self, name: str) -> list[int] | None:
        """Returns the numbers of a constant, or None for another tensor."""
        return [int(value) for value in numpy_helper.to_array(self.constants[name]).reshape(-1)] if name in self.constants else None


def drop_unread_tokens(graph: onnx.GraphProto) -> int:
    """Lets no layer compute tokens that nothing reads, in place.

    Args:
        graph: A graph whose value_info has the shape of every tensor; sizes that are not known have names, equal where the sizes are equal,
            as torch.onnx.export(dynamo=True) writes them. The shapes are not kept up to date.

    Returns:
        How many products of matrices have fewer rows now.
    """
    typed = (*graph.input, *graph.value_info, *graph.output)
    floats = {value.name for value in typed if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    known = KnownGraph.of(graph)
    producer = {output: node for node in graph.node for output in node.output}
    readers = [(node, *found) for node in graph.node if (found := _reads(node, known)) is not None and node.input[0] in floats]
    heads = {id(node): axis for node, axis, _ in readers if _rows_needed(producer.get(node.input[0]), axis, known) is not None}
    if not heads:
        return 0
    rows = max(count for node, _, count in readers if id(node) in heads)
    asked = ask(graph, heads, known)
    products: int = sum(node.op_type == "MatMul" for node in graph.node if id(node) in asked)
    if products:

        def first(name: str, output: str, axis: int) -> onnx.NodeProto:
            return _slice(graph, name, output, axis, rows)

        write_narrowed(graph, asked, known, first, "read")
    return products


def _reads(node: onnx.NodeProto, known: KnownGraph) -> tuple[int, int] | None:
    """Returns the axis along which a Gather reads only the first rows, and their number; None for any other node."""
    indices = known.integers(node.input[1]) if node.op_type == "Gather" else None
    shape = known.shapes.get(node.input[0], [])
    if not indices or min(indices) < 0 or max(indices) >= MOST or not shape:
        return None
    axis, count = _integer(node, "axis", 0) % len(shape), max(indices) + 1
    size: Dim = shape[axis]
    return (axis, count) if 0 < axis < len(shape) - 1 and (isinstance(size, str) or size > count) else None


def ask(
    graph: onnx.GraphProto, heads: Mapping[int, int], known: KnownGraph, takes: Callable[[str, int], bool] = lambda name, axis: True
) -> dict[int, list[int | None]]:
    """Returns, by the identity of each node that shall compute fewer rows, the axis of those rows in each input; None: all are read.

    Args:
        graph: The graph.
        heads: Axis of the rows that a node reads of its first input, by the identity of the node.
        known: The shapes; records which tensors will have fewer rows.
        takes: Whether rows of an axis can be taken of an input of the graph, or of a constant.
    """
    given = {value.name for value in (*graph.input, *graph.initializer)}
    wanted: dict[str, set[int | None]] = {value.name: {None} for value in graph.output}
    asked: dict[int, list[int | None]] = {}
    for node in reversed(graph.node):
        axes = {axis for output in node.output for axis in wanted.get(output, set())}
        inputs: list[int | None] = [None] * len(node.input)
        if id(node) in heads:
            inputs[0] = heads[id(node)]
        elif len(axes) == 1 and (axis := next(iter(axes))) is not None:
            rows = _rows_needed(node, axis, known)
            if rows is not None and all(
                of is None or name not in given or takes(name, of) for name, of in zip(node.input, rows, strict=True)
            ):
                inputs = asked[id(node)] = rows
                known.narrowed |= dict.fromkeys(node.output, axis)
        for name, of in zip(node.input, inputs, strict=True):
            wanted.setdefault(name, set()).add(of)
    return asked


def _rows_needed(node: onnx.NodeProto | None, axis: int, known: KnownGraph) -> list[int | None] | None:
    """Returns which rows of each input a node needs for the first rows of one axis of its outputs.

    Returns:
        For each input the axis of its rows, or None where all of it is needed; None if the rows of this node are not computed alike.
    """
    if node is None:
        return None
    first = _first_input(node, axis, known)
    if first is not None:
        return [first, *[None] * (len(node.input) - 1)]
    if node.op_type == "Concat" and _integer(node, "axis", 0) % len(known.shapes[node.output[0]]) != axis:
        return [axis] * len(node.input)
    if node.op_type not in _ROWWISE:
        return None
    output = known.shapes[node.output[0]]
    inputs: list[int | None] = []
    for name in node.input:
        own = axis - (len(output) - len(known.shapes.get(name, ())))
        size = known.shapes[name][own] if own >= 0 and name else 1
        if size not in (1, output[axis]):
            return None
        inputs.append(None if size == 1 else own)
    return inputs


def _first_input(node: onnx.NodeProto, axis: int, known: KnownGraph) -> int | None:
    """Returns the axis of the first input whose rows are the rows of an axis of the output, for operations that read their others in
    full."""
    source, output = known.shapes.get(node.input[0], []), known.shapes[node.output[0]]
    rank = len(source)
    match node.op_type:
        case "MatMul":
            other = len(known.shapes[node.input[1]])
            own = axis - (len(output) - rank)
            return own if min(rank, other) >= 2 and own >= 0 and (own == rank - 2 or (other == 2 and own < rank - 1)) else None
        case "LayerNormalization" | "RMSNormalization":
            return axis if axis < _integer(node, "axis", -1) % rank else None
        case "Softmax" | "LogSoftmax":
            return axis if axis != _integer(node, "axis", -1) % rank else None
        case "Transpose":
            return int(helper.get_node_attr_value(node, "perm")[axis])
        case "Split":
            return axis if axis != _integer(node, "axis", 0) % rank else None
        case "Reshape":
            later = output[axis + 1 :]
            same = source[: axis + 1] == output[: axis + 1] and sum(isinstance(size, str) for size in later) <= 1
            return axis if same else None
    place = 3 if node.op_type == "Slice" else 1
    axes = known.integers(node.input[place]) if len(node.input) > place else None
    if axes is None:
        return None
    if node.op_type == "Slice" or (node.op_type in ("ReduceMean", "ReduceSum", "ReduceMax") and _integer(node, "keepdims", 1)):
        return axis if axis not in {entry % rank for entry in axes} else None
    if node.op_type == "Squeeze":
        return [entry for entry in range(rank) if entry not in {entry % rank for entry in axes}][axis]
    if node.op_type == "Unsqueeze":
        new = {entry % len(output) for entry in axes}
        return None if axis in new else axis - sum(entry < axis for entry in new)
    return None


def write_narrowed(
    graph: onnx.GraphProto,
    needed: Mapping[int, list[int | None]],
    known: KnownGraph,
    narrow: Callable[[str, str, int], onnx.NodeProto],
    word: str,
) -> None:
    """Narrows what is read by operations that shall compute fewer rows, and lets reshapes take the rows that come.

    Args:
        graph: The graph, changed in place.
        needed: What `ask` returned.
        known: The shapes; says which tensors have fewer rows already.
        narrow: Makes the node that takes some rows of a tensor, given its name, the output's name, and the axis.
        word: What names of narrowed tensors end in.
    """
    made: dict[tuple[str, int], str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for index, axis in enumerate(needed.get(id(node), ())):
            name = node.input[index]
            if axis is None or known.narrowed.get(name) == axis:
                continue
            if (name, axis) not in made:
                made[name, axis] = f"{name}.{word}" if axis == 1 else f"{name}.{word}.{axis}"
                nodes.append(narrow(name, made[name, axis], axis))
            node.input[index] = made[name, axis]
        if node.op_type == "Reshape" and node.output[0] in known.narrowed:
            output, axis = known.shapes[node.output[0]], known.narrowed[node.output[0]]
            later = [-1 if isinstance(size, str) else size for size in output[axis + 1 :]]
            node.input[1] = _constant(graph, f"{node.output[0]}.shape", [*[0] * (axis + 1), *later])
            del node.attribute[:]  # allowzero: a 0 stands for as many as come
        nodes.append(node)
    replace_nodes(graph, nodes)


def _slice(graph: onnx.GraphProto, name: str, output: str, axis: int, rows: int) -> onnx.NodeProto:
    ends = [_constant(graph, f"{output}.{part}", [value]) for part, value in (("start", 0), ("end", rows), ("axis", axis))]
    return helper.make_node("Slice", [name, *ends], [output], f"{output}/Slice")


def _constant(graph: onnx.GraphProto, name: str, values: list[int]) -> str:
    graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return name


def _integer(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)
