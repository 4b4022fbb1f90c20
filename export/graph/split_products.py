"""A product whose result is split becomes one product for each part, with its columns of the weight.

    Split(x W + b, [n1, n2, ...])   ->   x W_1 + b_1,  x W_2 + b_2, ...      W [I, O], codes int8 or weights float32, split along O

GPT-2 computes queries, keys and values by one layer, `c_attn`. TensorRT's compiler moves a split after a quantized product into its
weight: it dequantizes the codes, cuts them, and multiplies in floats (seen on TensorRT-RTX 1.7.1: the layer reads int8 activations next to
weights in half). With three products it finds three integer GEMMs, which it runs as one where that is faster, as it does in BERT. The
integers stay as in the checkpoint, and so does every sum.

The parts of node `<module>/MatMul` are `<module>/MatMul.0`, `.1`, ...; all keep the module.

Left out: splits after a reshape, and products that something else reads besides the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from export.graph.nodes import prune_initializers
from export.graph.onnx import MODULE, module_of


@dataclass(frozen=True)
class _Match:
    """A product, the bias after it or None, and the split of their result."""

    product: onnx.NodeProto
    bias: onnx.NodeProto | None
    split: onnx.NodeProto
    weight: onnx.NodeProto | None
    """The DequantizeLinear that makes the weight; None where it is float."""
    sizes: tuple[int, ...]
    """Columns of each part."""


def split_products(model: onnx.ModelProto) -> int:
    """Splits the products of a float or Q/DQ graph whose result is split, in place.

    Returns:
        How many products were split.
    """
    graph = model.graph
    found = list(_find(graph))
    values = {item.name: item for item in graph.initializer}
    replaced = {}
    for one in found:
        replaced[one.split.name] = list(_written(one, graph, values))
    dropped = {node.name for one in found for node in (one.product, one.bias, one.split) if node is not None}
    nodes = [new for node in graph.node for new in replaced.get(node.name, [] if node.name in dropped else [node])]
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes if any(name in read for name in node.output)]
    del graph.node[:]
    graph.node.extend(kept)
    prune_initializers(graph)
    return len(found)


def _find(graph: onnx.GraphProto) -> Iterator[_Match]:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    producer = {output: node for node in graph.node for output in node.output}
    values, returned = {item.name: item for item in graph.initializer}, {value.name for value in graph.output}
    for product in graph.node:
        if product.op_type != "MatMul":
            continue
        weight = producer.get(product.input[1])
        stored = values.get(product.input[1] if weight is None else weight.input[0])
        if stored is None or len(stored.dims) != 2 or (weight is not None and weight.op_type != "DequantizeLinear"):
            continue
        last, bias = product, None
        behind = readers.get(last.output[0], [])
        if last.output[0] in returned:
            continue
        if len(behind) == 1 and behind[0].op_type == "Add" and any(name in values for name in behind[0].input):
            last = bias = behind[0]
            behind = readers.get(last.output[0], [])
        if last.output[0] in returned:
            continue
        if len(behind) == 1 and behind[0].op_type == "Split" and _axis(behind[0]) in (-1, 2):  # of [B, S, O]
            sizes = _sizes(behind[0], values, stored.dims[1])
            if sizes is not None:
                yield _Match(product, bias, behind[0], weight, sizes)


def _sizes(split: onnx.NodeProto, values: dict[str, onnx.TensorProto], width: int) -> tuple[int, ...] | None:
    """Returns the columns of the parts; None where the graph computes them."""
    if len(split.input) > 1 and split.input[1]:
        return tuple(numpy_helper.to_array(values[split.input[1]]).tolist()) if split.input[1] in values else None
    most = -(-width // len(split.output))  # equal parts; the last one has what is left
    return tuple(min(most, width - start) for start in range(0, width, most))


def _axis(split: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in split.attribute if attribute.name == "axis"), 0)


def _written(match: _Match, graph: onnx.GraphProto, values: dict[str, onnx.TensorProto]) -> Iterator[onnx.NodeProto]:
    """Yields the nodes that take the place of the split."""
    product, bias, weight = match.product, match.bias, match.weight
    ends = np.cumsum(match.sizes).tolist()
    for part, (size, end) in enumerate(zip(match.sizes, ends, strict=True)):

        def cut(name: str, part: int = part, start: int = end - size, end: int = end) -> str:
            """Returns the name of the columns of this part; of the tensor itself where it has a single value for all."""
            array = numpy_helper.to_array(values[name])
            if array.size == 1:
                return name
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array[..., start:end]), f"{name}.{part}"))
            return f"{name}.{part}"

        factor = cut(product.input[1]) if weight is None else f"{weight.output[0]}.{part}"
        if weight is not None:
            node = onnx.NodeProto()
            node.CopyFrom(weight)
            node.name, node.output[:], node.input[:] = f"{weight.name}.{part}", [factor], [cut(name) for name in weight.input]
            yield node
        output = match.split.output[part]
        made = helper.make_node(
            "MatMul", [product.input[0], factor], [output if bias is None else f"{output}.product"], f"{product.name}.{part}"
        )
        made.metadata_props.add(key=MODULE, value=module_of(product) or product.name)
        yield made
        if bias is not None:
            given = [cut(name) if name in values else made.output[0] for name in bias.input]
            yield helper.make_node("Add", given, [output], f"{bias.name}.{part}")
