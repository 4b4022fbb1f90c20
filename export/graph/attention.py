"""Attention of a half graph as ONNX's operator Attention (opset 23), which TensorRT runs as one fused kernel, or refuses to build.

    softmax((Q K^T) s + M) V   ->   Attention(Q s, K, V, M), scale 1
    Q [B, H, S, D], K [B, H, T, D], V [B, H, T, E], M [B or 1, H or 1, S or 1, T]

The products are the nodes `<module>/qk` and `<module>/pv` of `export.graph.onnx`. Between them may be a factor or divisor, masks and
position biases that are added, one Softmax over the last axis, and casts. The factor is applied to Q in front of the product, as NVIDIA's
kernels ask: after it the scores are larger by its reciprocal, and a fused kernel may add them up in 16 bits. Masks are cast to the type
of Q and added up.

How many heads there are is written into the shapes that split them, where it was left for a reshape to find: a kernel is chosen by it, and
`foundation.standalone.tensorrt_plan.gate` groups attentions by it.

What stays as it is, with the reason: attention that is not in 16 bits (fused kernels need 16 bits; islands of
`export.graph.half_precision` are there because scores may overflow), whose masks are too large for 16 bits, that reads codes of Q/DQ, or
that has anything else between its products, such as a soft cap.

The new node is `<module>/attention`. The opset becomes 23, which changes the meaning of no operation of ours but GroupNormalization; a
graph with that keeps its attention too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.graph.half_precision import LARGEST
from export.graph.nodes import replace_nodes

OPSET: Final = 23
IR_VERSION: Final = 11
"""The first one that has opset 23."""
NODE: Final = "attention"
_HALVES: Final = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True)
class Fused:
    """A graph whose attention is one node each, as far as that can be."""

    model: onnx.ModelProto
    products: Mapping[str, tuple[str, str]]
    """Names of the two products by the name of the node that replaces them."""
    left: Mapping[str, str]
    """Why a `pv` node stays, by its name."""

    @property
    def of(self) -> int:
        """Attentions of the graph."""
        return len(self.products) + len(self.left)


@dataclass
class _Pattern:
    """One attention, read from its end."""

    qk: onnx.NodeProto
    factors: list[tuple[str, bool]]
    """Scalar tensors that scores are multiplied by, or divided by."""
    added: list[str]
    """Masks and biases."""


class _Unknown(Exception):
    """An operation between the products that a fused kernel does not have."""


def fuse_attention(model: onnx.ModelProto, largest: Mapping[str, float], but: Mapping[str, str] | None = None) -> Fused:
    """Replaces every attention of a half graph that a fused kernel may run.

    Args:
        model: What `export.graph.half_precision` made; left as it is.
        largest: Magnitudes of tensors of the float graph (`export.graph.ranges`); masks that are absent fit.
        but: Attentions that stay, by the name that their node would have, and why.
    """
    but = but or {}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    types = _types(made)
    producer = {output: node for node in graph.node for output in node.output}
    values = {item.name: item for item in graph.initializer}
    grouped = any(node.op_type == "GroupNormalization" for node in graph.node)
    replaced: dict[str, list[onnx.NodeProto]] = {}
    products: dict[str, tuple[str, str]] = {}
    left: dict[str, str] = {}
    for pv in graph.node:
        if pv.op_type != "MatMul" or not _ends(pv.name, "pv"):
            continue
        try:
            if _renamed(pv.name) in but:
                raise _Unknown(but[_renamed(pv.name)])
            if grouped:
                raise _Unknown("the graph has a GroupNormalization, which opset 23 changes")
            pattern = _read(pv, producer, values, types)
            if sum(largest.get(name.removesuffix(".fp32"), 0.0) for name in pattern.added) > LARGEST["fp16"]:
                raise _Unknown("its masks are too large for halves")
        except _Unknown as reason:
            left[pv.name] = str(reason)
            continue
        name = _renamed(pv.name)
        replaced[pv.name] = _written(name, pv, pattern, graph, (producer, types))
        products[name] = (pattern.qk.name, pv.name)
    nodes = [new for node in graph.node for new in replaced.get(node.name, [node])]
    replace_nodes(graph, nodes)
    if products:
        (entry,) = made.opset_import
        entry.version, made.ir_version = max(entry.version, OPSET), max(made.ir_version, IR_VERSION)
        _write_heads(made)
    return Fused(made, products, left)


def _ends(name: str, product: str) -> bool:
    """Whether a node is this product of an attention: `<module>/pv`, or `<module>/pv.2` where the module runs again."""
    return name.rsplit("/", 1)[-1].split(".")[0] == product


def _renamed(pv: str) -> str:
    module, _, end = pv.rpartition("/")
    return f"{module}/{NODE}{end.removeprefix('pv')}"


def _types(model: onnx.ModelProto) -> dict[str, int]:
    typed = onnx.shape_inference.infer_shapes(model).graph
    values = {value.name: value.type.tensor_type.elem_type for value in (*typed.input, *typed.value_info, *typed.output)}
    return values | {item.name: item.data_type for item in typed.initializer}


def _read(
    pv: onnx.NodeProto, producer: Mapping[str, onnx.NodeProto], values: Mapping[str, TensorProto], types: Mapping[str, int]
) -> _Pattern:
    """Walks from `pv` back to its `qk`."""
    if types.get(pv.input[0]) not in _HALVES or types.get(pv.input[1]) not in _HALVES:
        raise _Unknown("the product with the values is not in halves")
    factors: list[tuple[str, bool]] = []
    added: list[str] = []
    tensor, softmax = pv.input[0], False
    while True:
        node = producer.get(tensor)
        if node is None:
            raise _Unknown("no product of queries and keys stands before it")
        if node.op_type == "MatMul" and _ends(node.name, "qk"):
            break
        if node.op_type == "Softmax" and not softmax and _axis(node) == -1:
            softmax, tensor = True, node.input[0]
        elif node.op_type == "Cast" and types.get(node.input[0]) in (*_HALVES, TensorProto.FLOAT):
            tensor = node.input[0]
        elif node.op_type == "Add" and softmax:
            tensor, other = _sides(node, producer)
            if factors:
                raise _Unknown("a mask is scaled with the scores")
            added.append(other)
        elif node.op_type in ("Mul", "Div") and softmax:
            index = next((index for index in (1, 0) if _is_scalar(node.input[index], values)), None)
            if index is None or (node.op_type == "Div" and index == 0):
                raise _Unknown(f"scores are changed by {node.op_type} with a tensor")
            factors.append((node.input[index], node.op_type == "Div"))
            tensor = node.input[1 - index]
        else:
            raise _Unknown(f"{node.op_type} stands between its products")
    if not softmax:
        raise _Unknown("no Softmax stands between its products")
    if any(types.get(name) not in _HALVES for name in node.input):
        raise _Unknown("the product of queries and keys is not in halves")
    made = producer.get(node.input[1])
    if made is None or made.op_type != "Transpose" or len(_perm(made)) != 4:
        raise _Unknown("its keys are no transposed [B, H, T, D]")
    for name in (*node.input, pv.input[1]):
        if _from_codes(name, producer):
            raise _Unknown("its products read codes of int8; no fused kernel takes them")
    return _Pattern(node, factors, added)


def _written(
    name: str, pv: onnx.NodeProto, pattern: _Pattern, graph: onnx.GraphProto, known: tuple[Mapping[str, onnx.NodeProto], dict[str, int]]
) -> list[onnx.NodeProto]:
    """Returns the nodes that take the place of `pv`."""
    producer, types = known
    query, turned = pattern.qk.input
    half, nodes = types[query], []
    if pattern.factors:
        scalars = {item.name: float(numpy_helper.to_array(item).reshape(())) for item in graph.initializer if _is_single(item)}
        scale = np.prod([1 / scalars[factor] if divides else scalars[factor] for factor, divides in pattern.factors])
        array: NDArray[np.generic] = np.array(scale, helper.tensor_dtype_to_np_dtype(half))
        graph.initializer.append(numpy_helper.from_array(array, f"{name}.scale"))
        nodes.append(helper.make_node("Mul", [query, f"{name}.scale"], [f"{name}.query"], f"{name}.query/Mul"))
        query = f"{name}.query"
    transpose = producer[turned]
    perm = _perm(transpose)
    straight = [perm[0], perm[1], perm[3], perm[2]]
    nodes.append(helper.make_node("Transpose", [transpose.input[0]], [f"{name}.key"], f"{name}.key/Transpose", perm=straight))
    inputs = [query, f"{name}.key", pv.input[1]]
    masks = []
    for index, added in enumerate(pattern.added):
        masks.append(added)
        if types.get(added) != half:
            masks[-1] = f"{name}.mask.{index}"
            nodes.append(helper.make_node("Cast", [added], masks[-1:], f"{masks[-1]}/Cast", to=half))
    for index, other in enumerate(masks[1:]):
        total = f"{name}.masks.{index}"
        nodes.append(helper.make_node("Add", [masks[0], other], [total], f"{total}/Add"))
        masks[0] = total
    inputs += masks[:1]
    nodes.append(helper.make_node("Attention", inputs, list(pv.output), name, scale=1.0))
    return nodes


def _write_heads(model: onnx.ModelProto) -> None:
    """Puts the number of heads for the -1 in shapes [B, S, -1, D] that a tensor of known width is split by, in place."""
    graph = model.graph
    typed = onnx.shape_inference.infer_shapes(model, data_prop=True).graph  # sizes go through shapes that the graph computes
    widths = {value.name: dims[-1].dim_value for value in typed.value_info if (dims := value.type.tensor_type.shape.dim)}
    producer = {output: node for node in graph.node for output in node.output}
    values = {item.name: numpy_helper.to_array(item) for item in graph.initializer if item.data_type == TensorProto.INT64}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        shape = producer.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is not None and shape.op_type == "Concat" and len(shape.input) == 4 and all(name in values for name in shape.input[2:]):
            (middle,), (size,) = (values[name].reshape(-1).tolist() for name in shape.input[2:])
            width = widths.get(node.input[0], 0)
            if middle == -1 and width and width % size == 0:
                heads = f"{node.name}.heads"
                graph.initializer.append(numpy_helper.from_array(np.array([width // size], np.int64), heads))
                told = helper.make_node(
                    "Concat", [*shape.input[:2], heads, shape.input[3]], [f"{node.name}.shape"], f"{node.name}.shape", axis=0
                )
                node.input[1] = told.output[0]
                nodes.append(told)
        nodes.append(node)
    replace_nodes(graph, nodes)


def _sides(node: onnx.NodeProto, producer: Mapping[str, onnx.NodeProto]) -> tuple[str, str]:
    """Returns the operands of an Add: the scores, and the other tensor."""
    first, second = node.input
    if _are_scores(first, producer):
        return first, second
    if _are_scores(second, producer):
        return second, first
    raise _Unknown("an Add that adds no scores stands between its products")


def _are_scores(tensor: str, producer: Mapping[str, onnx.NodeProto]) -> bool:
    node = producer.get(tensor)
    if node is None:
        return False
    if node.op_type == "MatMul":
        return _ends(node.name, "qk")
    return node.op_type in ("Add", "Mul", "Div", "Cast") and any(_are_scores(name, producer) for name in node.input)


def _from_codes(tensor: str, producer: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether a tensor is what DequantizeLinear made, cast or moved."""
    node = producer.get(tensor)
    while node is not None and node.op_type in ("Cast", "Transpose", "Reshape"):
        node = producer.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"


def _axis(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), -1)


def _perm(node: onnx.NodeProto) -> list[int]:
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), [])


def _is_scalar(tensor: str, values: Mapping[str, TensorProto]) -> bool:
    return tensor in values and _is_single(values[tensor])


def _is_single(item: TensorProto) -> bool:
    return bool(np.prod(item.dims) == 1) and item.data_type in (*_HALVES, TensorProto.FLOAT)
