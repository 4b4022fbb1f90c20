"""Int8 convolutions for ONNX Runtime: the integer product spelled out, as no kernel of it takes the Q/DQ form.

ONNX Runtime fuses DequantizeLinear, Conv, QuantizeLinear to QLinearConv. Our convolutions are followed by a bias, a ReLU, an addition, and
only then the next QuantizeLinear, so that it would multiply in float. Each convolution whose inputs are both dequantized becomes

    ConvInteger(q_x, q_w)  ->  Cast to float  ->  Mul by s_x * s_w  ->  Add of the bias

with the same integers, and the same float operations in the same order as `foundation.schemes.int8_convolution`. ConvInteger takes the
place of the convolution: it keeps its name, its metadata and the name of its output. It reads uint8 activations, so that this comes after
`export.graph.qdq.uint8_activations`.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.graph.nodes import prune_initializers


def integer_convolutions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replaces the convolutions of a Q/DQ model with uint8 activations by integer ones, in place; returns the model."""
    graph = model.graph
    constant = {tensor.name: tensor for tensor in graph.initializer}
    dequantized = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        pair = [dequantized.get(tensor) for tensor in node.input[:2]] if node.op_type == "Conv" else [None]
        if any(source is None for source in pair):
            nodes.append(node)
            continue
        activation, weight = (source for source in pair if source is not None)
        scales = [numpy_helper.to_array(constant[source.input[1]]) for source in (activation, weight)]
        rank = len(constant[weight.input[0]].dims) - 2
        scale_O = np.asarray(scales[0] * scales[1], np.float32).reshape(-1, *[1] * rank)
        graph.initializer.append(numpy_helper.from_array(scale_O, f"{node.output[0]}.scale"))
        nodes += _integer(node, [activation.input[0], weight.input[0], activation.input[2]])  # weights have no zero-point
        if len(node.input) > 2:
            bias_O = numpy_helper.to_array(constant[node.input[2]]).reshape(scale_O.shape)
            graph.initializer.append(numpy_helper.from_array(bias_O, f"{node.output[0]}.shift"))
            nodes.append(helper.make_node("Add", [f"{node.output[0]}.product", f"{node.output[0]}.shift"], [node.output[0]]))
            nodes[-1].name = f"{node.name}/Add"
    read = {tensor for node in nodes for tensor in node.input} | {value.name for value in graph.output}
    kept = [node for node in nodes if node.op_type != "DequantizeLinear" or node.output[0] in read]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(copies)
    prune_initializers(graph)
    return model


def _integer(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Returns the nodes up to the rescaled product; it is the output of the convolution if that has no bias."""
    output = node.output[0]
    product = helper.make_node("ConvInteger", inputs, [f"{output}.int32"], node.name)
    product.attribute.extend(node.attribute)
    helper.set_metadata_props(product, {entry.key: entry.value for entry in node.metadata_props})
    rescaled = f"{output}.product" if len(node.input) > 2 else output
    return [
        product,
        helper.make_node("Cast", [f"{output}.int32"], [f"{output}.sum"], f"{node.name}/Cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{output}.sum", f"{output}.scale"], [rescaled], f"{node.name}/Mul"),
    ]
