"""Q/DQ around the products of attention and on residual additions: the sites of a checkpoint in its ONNX graph.

    Y = DQ(Q(A; s_A); s_A) @ DQ(Q(B; s_B); s_B)          at `<module>/qk` and `<module>/pv`, the nodes that `export.graph.onnx` names so
    z = y + DQ(Q(r; s_r); s_r)                           at the addition that follows the GEMM of `<layer>/residual`

with the scales of `foundation.schemes.sites` and the same places: Q before the scaling of the scores, P after the softmax, r where the
output of the layer, past its bias and reshapes, is added to something. A tensor that is quantized with the same scale already (a residual
that a linear layer reads too) keeps its one pair of Q/DQ.

What engines make of it, as their own graphs say (OpenVINO 2026.4, ONNX Runtime 1.31, a CPU with VNNI; BERT, RoBERTa, DistilBERT,
ModernBERT, ViT, GPT-2, Llama):

    OpenVINO, both modes   attention is one Subgraph (jit_avx512_i8) that reads i8 queries, keys and values, as which the layers before it
                           write them; with one product in float it stays one Subgraph, and reads f32 there. Mask and softmax are f32.
                           A residual is written as i8 next to the float tensor and read as i8; the addition itself is f32.
    ONNX Runtime           `qk` is MatMulIntegerToFloat, `pv` QLinearMatMul (or MatMulIntegerToFloat where no Q follows). A residual is
                           rounded and added in float: QuantizeLinear, DequantizeLinear, Add. It gains nothing there.
    TensorRT               the graph compiles ahead of time (TensorRT-RTX); what runs in int8 is for a GPU to tell, and not known here.

Left out: sharing a pair between tensors that differ only by a reshape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from export.graph.onnx import module_of
from foundation.schemes.sites import Sites, owner

PASSED = frozenset({"Reshape", "Identity", "Dropout"})
"""Operations between a GEMM and the addition of a residual; the addition of a bias is another."""
_PRODUCTS = ("/qk", "/pv")
Input = tuple[str, int]
"""Name of a node, and which of its inputs."""


def insert_sites(graph: onnx.GraphProto, sites: Sites, zero_point: str) -> None:
    """Puts Q/DQ on the inputs of every site, in place.

    Args:
        graph: A flat graph of `export.graph.onnx`, whose layers have their Q/DQ already.
        sites: Names and scales.
        zero_point: Name of the initializer with the int8 zero-point 0.

    Raises:
        ValueError: A site is not in the graph exactly once.
    """
    wanted = {place: (name, scale) for name, place, scale in _places(graph, sites)}
    constant = {tensor.name: tensor for tensor in graph.initializer}
    producer = {output: node for node in graph.node for output in node.output}
    pairs: dict[tuple[str, float], str] = {}
    nodes = []
    for node in graph.node:
        for index, tensor in enumerate(node.input):
            if (node.name, index) not in wanted:
                continue
            name, scale = wanted[node.name, index]
            if (tensor, scale) not in pairs:
                pairs[tensor, scale] = f"{name}.dequantized"
                graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), f"{name}.scale"))
                nodes += _pair(tensor, name, zero_point)
            node.input[index] = pairs[tensor, scale]
        if node.op_type == "DequantizeLinear" and node.input[0] in producer:
            source = producer[node.input[0]]
            pairs[source.input[0], float(numpy_helper.to_array(constant[source.input[1]]))] = node.output[0]
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _places(graph: onnx.GraphProto, sites: Sites) -> Iterator[tuple[str, Input, float]]:
    """Yields for each tensor to quantize its name, the input of a node that it is, and its scale."""
    for site, scales in sites.products.items():
        node = _only(site, [node for node in graph.node if node.name == site and node.op_type == "MatMul"])
        name = site.replace("/", ".")  # engines report nodes by name, and one that begins like the product's would be taken for it
        yield f"{name}_left", (node.name, 0), float(scales.left)
        yield f"{name}_right", (node.name, 1), float(scales.right)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for tensor in node.input:
            readers.setdefault(tensor, []).append(node)
    constant = {tensor.name for tensor in graph.initializer}
    for site, scale in sites.residuals.items():
        yield site.replace("/", "."), _addition(site, graph, readers, constant), float(scale)


def _addition(site: str, graph: onnx.GraphProto, readers: Mapping[str, list[onnx.NodeProto]], constant: set[str]) -> Input:
    """Returns the input of an Add that is the residual of a layer."""
    gemms = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and not node.name.endswith(_PRODUCTS)]
    node = _only(site, [node for node in gemms if module_of(node) == owner(site)])
    while True:
        output = node.output[0]
        node = _only(site, readers.get(output, []))
        if node.op_type == "Add":
            index = 1 - list(node.input).index(output)
            if node.input[index] not in constant:
                return node.name, index
        elif node.op_type not in PASSED:
            raise ValueError(f"{site}: in the graph no addition follows the layer, but {node.op_type}")


def _only(site: str, nodes: list[onnx.NodeProto]) -> onnx.NodeProto:
    if len(nodes) != 1:
        raise ValueError(f"every site of quantization.json needs exactly one place: {site} is in the graph {len(nodes)} times")
    return nodes[0]


def _pair(tensor: str, name: str, zero_point: str) -> list[onnx.NodeProto]:
    codes, output, parameters = f"{name}.quantized", f"{name}.dequantized", [f"{name}.scale", zero_point]
    return [
        helper.make_node("QuantizeLinear", [tensor, *parameters], [codes], f"{codes}/QuantizeLinear"),
        helper.make_node("DequantizeLinear", [codes, *parameters], [output], f"{output}/DequantizeLinear"),
    ]
