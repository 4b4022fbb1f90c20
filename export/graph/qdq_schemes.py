"""The other schemes in ONNX: constants and nodes for dynamic int8, integer weights and FP8, next to the static int8 of `export.graph.qdq`.

For a layer y = x @ W.T with weight codes Wq and scales t:

    w8a8-dynamic   y = x @ DQ(Wq; t).T                          int8 [O]: OpenVINO quantizes the activations by itself where a setting says
                   so
                   y = float(MatMulInteger(q, Wq.T)) * s * t    for ONNX Runtime, with the scale of each token in the graph
    w8a16          y = x @ DQ(Wq; t).T                          int8 [O]
    w4a16          y = x @ DQ(Wq; t, blocks).T                  int4 [O, G], opset 21; with zero points z y = x @ DQ(Wq + 8; t, z + 8).T
                                                                in uint4, the type that engines have kernels with zero points for
    fp8            y = DQ(Q(x; s); s) @ DQ(Wq; t).T             FLOAT8E4M3FN [O], saturating

The graph of ONNX Runtime spells out what `foundation.schemes.int8.DynamicInt8Linear` computes, in the same order, so that the codes are the
same:

    s = max(max |x| / 127, 2^-63)      Abs, ReduceMax, Div, Max
    q = clip(rint(x / s), -127, 127)   Div, Round, Clip; then + 128 as uint8 with zero-point 128, which its fast kernels on x86 take

Where the checkpoint has a smoothing vector v[I] for a layer, a Mul by 1 / v precedes it, and Wq are the codes of W * v. Layers that read
one tensor share what is made of it.

OpenVINO's CPU plugin quantizes groups of G inputs of each token, s = max |x| / 127 over the group, where 0 < G <= I, and multiplies in
float where G is larger (tried: equal to that formula to the last bits). So G is the largest divisor that the widths of all layers share, if
that is a multiple of 16, and 32 otherwise.

Left out: int4 in groups of unequal width for OpenVINO, whose reader refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from export.graph.nodes import prune_initializers
from export.graph.onnx import save
from export.graph.qdq import find_layers, is_transposed, weight_stem
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int8 import ACTIVATION_HIGH, DynamicScales
from foundation.schemes.scales import SMALLEST_SCALE, Scales, Stored

SMALLEST_GROUP, DEFAULT_GROUP = 16, 32
"""Group sizes of OpenVINO's dynamic quantization: what its kernels take, and what it does by itself."""
ZERO_POINT = 128


def insert_weights(float_onnx: Graph, checkpoint: Checkpoint, out: Path) -> Path:
    """Writes the model with constant weights in int8 or int4 and float activations, for w8a8-dynamic, w8a16 and w4a16; see `insert`."""
    return insert(float_onnx, checkpoint, out, _weight_only)


def insert_dynamic(float_onnx: Graph, checkpoint: Checkpoint, out: Path) -> Path:
    """Writes the model whose graph itself quantizes activations per token, for w8a8-dynamic in ONNX Runtime; see `insert`."""
    return insert(float_onnx, checkpoint, out, _dynamic)


def insert_fp8(float_onnx: Graph, checkpoint: Checkpoint, out: Path) -> Path:
    """Writes the Q/DQ model in FLOAT8E4M3FN; see `insert`."""
    return insert(float_onnx, checkpoint, out, _fp8)


class _Graph:
    """A graph that is written anew: adds constants once, and keeps what was already made of a tensor."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.names = set(self.weights)
        self.nodes: list[onnx.NodeProto] = []
        self.cache: dict[tuple[Hashable, ...], str] = {}
        self.since = (0, 0)
        """The first operator set and IR version that have what was added."""

    def constant(self, name: str, array: Array) -> str:
        if name not in self.names:
            self.names.add(name)
            self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], f"{output}/{kind}", **attributes))
        return output

    def once(self, key: tuple[Hashable, ...], make: Callable[[], str]) -> str:
        """Returns the tensor of a key, made where there is none yet."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


Rewrite = Callable[[_Graph, onnx.NodeProto, str, Scales], None]
"""Adds the nodes that take the place of the GEMM of a layer."""


def insert(float_onnx: Graph, checkpoint: Checkpoint, out: Path, rewrite: Rewrite) -> Path:
    """Writes the model of a quantized checkpoint.

    Args:
        float_onnx: What `export.graph.onnx.export_float` wrote for this checkpoint.
        checkpoint: The checkpoint.
        out: The file to write.
        rewrite: What becomes of the GEMM of a layer.

    Returns:
        `out`; inputs and outputs are as in `float_onnx`.

    Raises:
        ValueError: A layer is not in the graph, or its weights are not on the grid of its scales.
    """
    layers, _ = load_quantization(checkpoint.folder)
    model = float_onnx.load()
    chosen, graph = find_layers(model.graph, layers), _Graph(model.graph)
    for node in model.graph.node:
        name = chosen.get(node.name)
        if name is None:
            graph.nodes.append(node)
        else:
            rewrite(graph, node, name, layers[name])
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    prune_initializers(model.graph)
    (domain,) = (entry for entry in model.opset_import if not entry.domain)
    domain.version, model.ir_version = max(domain.version, graph.since[0]), max(model.ir_version, graph.since[1])
    return save(model, out)


def group_size(model: Graph) -> int:
    """Returns the group of OpenVINO's dynamic quantization for a model of `insert_weights` in w8a8-dynamic."""
    return group_of(width for _, width, _ in _weights(model))


def group_of(widths: Iterable[int]) -> int:
    """Returns the same for layers with so many inputs."""
    shared = math.gcd(*widths)
    return shared if shared % SMALLEST_GROUP == 0 else DEFAULT_GROUP


def uneven(model: Graph) -> str | None:
    """Returns in words a layer of a model in w4a16 whose last group is shorter than the others; None where there is none."""
    return next(
        (f"{name} has {width} inputs, no multiple of group_size {size}" for name, width, size in _weights(model) if size and width % size),
        None,
    )


def has_zero_points(model: Graph) -> bool:
    """Whether a model in w4a16 has weights with zero points."""
    graph = model.structure
    return any(tensor.data_type == TensorProto.UINT4 for tensor in graph.initializer)


def _weights(model: Graph) -> Iterator[tuple[str, int, int]]:
    """Yields name, number of inputs and size of a group (0: none) of every layer of a model of `insert_weights`."""
    graph = model.structure
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in shapes:
            values = {attribute.name: attribute.i for attribute in node.attribute}
            size = values.get("block_size", 0)
            axis = values["axis"] if size else 1 - values["axis"]  # blocks lie along the inputs, scales of channels along the outputs
            yield node.input[0].removesuffix(".weight.codes"), shapes[node.input[0]][axis], size


def _weight_only(graph: _Graph, node: onnx.NodeProto, name: str, scales: Scales) -> None:
    weight_OI, _ = _weight(graph, node)
    node.input[0] = _smoothed(graph, node.input[0], scales)
    _dequantized(graph, node, name, scales.stored(_codes(name, weight_OI, scales)))


def _fp8(graph: _Graph, node: onnx.NodeProto, name: str, scales: Scales) -> None:
    assert isinstance(scales, Fp8Scales), type(scales)
    weight_OI, _ = _weight(graph, node)
    codes_OI = _codes(name, weight_OI, scales)
    scale = scales.input_scale.numpy()
    tensor = node.input[0]

    def quantized() -> str:
        zero = graph.constant("zero_point.e4m3", np.zeros((), ml_dtypes.float8_e4m3fn))
        stem = f"{tensor}.e4m3.{len(graph.cache)}"
        inputs = [graph.constant(f"{stem}.scale", scale.reshape(())), zero]
        return graph.node("DequantizeLinear", [graph.node("QuantizeLinear", [tensor, *inputs], f"{stem}.quantized"), *inputs], stem)

    node.input[0] = graph.once((tensor, float(scale)), quantized)
    _dequantized(graph, node, name, scales.stored(codes_OI))


def _dynamic(graph: _Graph, node: onnx.NodeProto, name: str, scales: Scales) -> None:
    assert isinstance(scales, DynamicScales), type(scales)
    weight_OI, _ = _weight(graph, node)
    tensor = _smoothed(graph, node.input[0], scales)
    stem = graph.once((tensor, "codes"), lambda: _tokens(graph, tensor))
    codes_IO = np.ascontiguousarray(_codes(name, weight_OI, scales).numpy().T)
    inputs = [
        f"{stem}.uint8",
        graph.constant(f"{name}.weight.codes", codes_IO),
        graph.constant("zero_point.128", np.array(ZERO_POINT, np.uint8)),
    ]
    metadata, output = {entry.key: entry.value for entry in node.metadata_props}, node.output[0]
    product = helper.make_node("MatMulInteger", inputs, [f"{output}.int32"], node.name)
    helper.set_metadata_props(product, metadata)
    graph.nodes.append(product)
    rescaled = graph.node("Cast", [f"{output}.int32"], f"{output}.sum", to=TensorProto.FLOAT)
    rescaled = graph.node("Mul", [rescaled, f"{stem}.scale"], f"{output}.rescaled")
    scale = graph.constant(f"{name}.weight.scale", scales.weight_scale.numpy())
    has_bias = node.op_type == "Gemm" and len(node.input) > 2
    graph.node("Mul", [rescaled, scale], f"{output}.product" if has_bias else output)
    if has_bias:
        graph.node("Add", [f"{output}.product", node.input[2]], output)


def _tokens(graph: _Graph, tensor: str) -> str:
    """Quantizes a tensor per token; returns the stem of `<stem>.scale` float32 [..., 1], `<stem>.codes` float32 and `<stem>.uint8`."""
    number = {key: graph.constant(f"number.{key}", np.array(value, np.float32)) for key, value in NUMBERS.items()}
    stem = f"{tensor}.token"
    axis = graph.constant("number.last_axis", np.array([-1], np.int64))
    largest = graph.node("ReduceMax", [graph.node("Abs", [tensor], f"{stem}.magnitude"), axis], f"{stem}.largest", keepdims=1)
    scale = graph.node("Max", [graph.node("Div", [largest, number["127"]], f"{stem}.step"), number["smallest"]], f"{stem}.scale")
    rounded = graph.node("Round", [graph.node("Div", [tensor, scale], f"{stem}.steps")], f"{stem}.rounded")
    codes = graph.node("Clip", [rounded, number["-127"], number["127"]], f"{stem}.codes")
    graph.node("Cast", [graph.node("Add", [codes, number["128"]], f"{stem}.moved")], f"{stem}.uint8", to=TensorProto.UINT8)
    return stem


NUMBERS: Mapping[str, float] = {"127": ACTIVATION_HIGH, "-127": -ACTIVATION_HIGH, "128": ZERO_POINT, "smallest": SMALLEST_SCALE}


def _weight(graph: _Graph, node: onnx.NodeProto) -> tuple[torch.Tensor, bool]:
    """Returns the weight of a GEMM, float32 [O, I], and whether the node has it that way round."""
    transposed = is_transposed(node)
    stored = torch.from_numpy(np.array(numpy_helper.to_array(graph.weights[node.input[1]]), np.float32))
    return (stored if transposed else stored.T.contiguous()), transposed


def _codes(name: str, weight_OI: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Recovers the codes of weights on their grid, [O, I].

    Raises:
        ValueError: They are on no such grid.
    """
    if not torch.allclose(scales.on_grid(weight_OI), weight_OI, rtol=1e-5, atol=0):
        raise ValueError(f"{name}: weights of the float graph are not on the grid of their scales: export it from this checkpoint")
    return scales.codes(weight_OI)


def _smoothed(graph: _Graph, tensor: str, scales: Scales) -> str:
    """Returns the tensor that a layer quantizes: its input, or a Mul of it by the reciprocal of the smoothing vector."""
    smooth_I = scales.tensors().get("input_smooth")
    if smooth_I is None:
        return tensor
    factor_I = np.float32(1) / smooth_I.numpy()

    def multiplied() -> str:
        stem = f"{tensor}.smoothed.{len(graph.cache)}"
        return graph.node("Mul", [tensor, graph.constant(f"{stem}.factor", factor_I)], stem)

    return graph.once((tensor, factor_I.tobytes()), multiplied)


def _dequantized(graph: _Graph, node: onnx.NodeProto, name: str, weight: Stored) -> None:
    """Lets a GEMM read its weight through DequantizeLinear, which all runs of a layer share."""
    transposed = is_transposed(node)
    graph.since = max(graph.since, weight.since)
    blocks = bool(weight.block_size)  # blocks lie along the inputs, scales of channels along the outputs
    attributes = {"axis": int(transposed == blocks), **({"block_size": weight.block_size} if blocks else {})}
    arrays = {"codes": weight.codes, "scale": weight.scale, "zero_point": weight.zero_point}

    def dequantized() -> str:
        stem = weight_stem(name, transposed, taken=("weight", name, not transposed) in graph.cache)
        inputs = [
            graph.constant(f"{stem}.{suffix}", np.ascontiguousarray(array if transposed else array.T))
            for suffix, array in arrays.items()
            if array is not None
        ]
        return graph.node("DequantizeLinear", inputs, f"{stem}.dequantized", **attributes)

    node.input[1] = graph.once(("weight", name, transposed), dequantized)
    graph.nodes.append(node)
