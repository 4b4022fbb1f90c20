"""True int8 in ONNX: QuantizeLinear and DequantizeLinear around the chosen GEMMs, with the scales of the checkpoint.

For a layer with input scale s, weight scales t[O] and weight codes Wq[O, I] the float node y = x @ W.T becomes

    y = DQ(Q(x; s); s) @ DQ(Wq; t).T      Q(x; s) = saturate(rint(x / s), -128, 127),  DQ(q; s) = q * s

and a convolution in the same way. An engine that knows the pattern runs it as one integer GEMM with a single rescale by s * t, and any
other runs it in float with the same numbers. Zero-points are 0; weights are stored as int8 only. Layers that read one tensor with one scale
share its Q/DQ pair.

Where the checkpoint has a smoothing vector v[I] for a layer (`input_smooth`), a Mul by 1 / v precedes Q and Wq are the codes of W * v.

Where the checkpoint lists products of attention or residual additions, `export.graph.qdq_products` does the same for those.

Left out: everything that the checkpoint does not list stays float.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

from export.graph.nodes import prune_initializers
from export.graph.onnx import GEMMS, module_of, save
from export.graph.qdq_products import insert_sites
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.schemes.sites import load_sites

ZERO_INT8, ZERO_UINT8 = "zero_point.int8", "zero_point.uint8"
_GRID_TOLERANCE = 1e-2
"""Largest distance of weight / scale from an integer: float32 rounding is below 1e-4 there, a weight off the grid is not."""


@dataclass(frozen=True)
class LayerScales:
    """Scales of one quantized layer: `input` float32 [], `weight` float32 [O], `smooth` float32 [I] or None."""

    input: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float32]
    smooth: npt.NDArray[np.float32] | None = None


def insert_qdq(float_onnx: Graph, checkpoint: Checkpoint, out: Path) -> Path:
    """Writes the Q/DQ model of a quantized checkpoint.

    Args:
        float_onnx: What `export.graph.onnx.export_float` wrote for this checkpoint.
        checkpoint: Folder with `quantization.json` and `quantization.safetensors`.
        out: The file to write.

    Returns:
        `out`; inputs and outputs are as in `float_onnx`.

    Raises:
        ValueError: A layer of quantization.json is not in the graph, a site is not in it exactly once, or weights are not on the grid
            of their scales.
    """
    scales = read_scales(checkpoint)
    model = float_onnx.load()
    _insert(model.graph, scales)
    insert_sites(model.graph, load_sites(checkpoint.folder), ZERO_INT8)
    return save(model, out)


def read_scales(checkpoint: Checkpoint) -> dict[str, LayerScales]:
    """Returns the scales of every quantized layer of a checkpoint, by module path, in the order of quantization.json."""
    tensors = load_file(checkpoint.folder / "quantization.safetensors")
    names = json.loads((checkpoint.folder / "quantization.json").read_text(encoding="utf-8"))["layers"]
    return {
        name: LayerScales(tensors[f"{name}.input_scale"], tensors[f"{name}.weight_scale"], tensors.get(f"{name}.input_smooth"))
        for name in names
    }


def uint8_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Derives the model whose activation codes are uint8 with zero-point 128: what ONNX Runtime on x86 has fast kernels for.

    The codes are the int8 model's plus 128, so every product and every sum is the same integer after the zero-point is taken
    off. Weights stay int8.

    Args:
        model: A model that `insert_qdq` wrote.

    Returns:
        A new model.
    """
    derived = onnx.ModelProto()
    derived.CopyFrom(model)
    graph = derived.graph
    codes = set()
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            node.input[2] = ZERO_UINT8
            codes.add(node.output[0])
        elif node.op_type == "DequantizeLinear" and node.input[0] in codes:
            node.input[2] = ZERO_UINT8
    graph.initializer.append(numpy_helper.from_array(np.array(128, np.uint8), ZERO_UINT8))
    prune_initializers(graph)
    return derived


def _insert(graph: onnx.GraphProto, scales: dict[str, LayerScales]) -> None:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    chosen = find_layers(graph, scales)
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int8), ZERO_INT8))
    pairs: dict[tuple[str, float, bytes], str] = {}
    shared: dict[tuple[str, bool], str] = {}
    nodes = []
    for node in graph.node:
        name = chosen.get(node.name)
        if name is not None:
            smooth_I = scales[name].smooth
            key = (node.input[0], float(scales[name].input), b"" if smooth_I is None else smooth_I.tobytes())
            if key not in pairs:
                pairs[key] = f"{key[0]}.dequantized" + (f".{len(pairs)}" if key[0] in {tensor for tensor, *_ in pairs} else "")
                nodes += _activation(graph, key[0], scales[name], pairs[key])
            layout = name, is_transposed(node)
            if layout not in shared:
                shared[layout] = weight_stem(name, layout[1], taken=(name, not layout[1]) in shared)
                array = numpy_helper.to_array(weights[node.input[1]])
                nodes.append(_weight(graph, layout, shared[layout], array, scales[name]))
            node.input[0], node.input[1] = pairs[key], f"{shared[layout]}.dequantized"
            if node.op_type == "Conv":
                _set_bias(graph, node, weights, len(scales[name].weight))
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    prune_initializers(graph)


def _set_bias(graph: onnx.GraphProto, node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], outputs: int) -> None:
    """Gives a convolution without a bias, or with one of zeros, a bias that is next to nothing.

    OpenVINO's dynamic mode returns the product of a convolution without a bias, where an addition follows it, multiplied by the scales
    twice (seen on ResNet), so that parity could not be checked. The smallest normal number changes no sum that is not 0.
    """
    if len(node.input) < 3 or not numpy_helper.to_array(weights[node.input[2]]).any():
        name = f"{node.output[0]}.bias"
        graph.initializer.append(numpy_helper.from_array(np.full(outputs, np.finfo(np.float32).tiny, np.float32), name))
        node.input[:] = [*node.input[:2], name]


def find_layers(graph: onnx.GraphProto, layers: Collection[str]) -> dict[str, str]:
    """Returns the module path of each chosen layer by the name of its node; a layer that runs several times has several nodes."""
    weights = {tensor.name for tensor in graph.initializer}
    found: dict[str, list[str]] = {name: [] for name in layers}
    for node in graph.node:
        name = module_of(node)
        if name in found and node.op_type in GEMMS and node.input[1] in weights:
            found[name].append(node.name)
    missing = [name for name, nodes in found.items() if not nodes]
    if missing:
        raise ValueError(f"every layer of quantization.json needs a GEMM in the graph: {', '.join(missing)} has none")
    return {node: name for name, nodes in found.items() for node in nodes}


def _activation(graph: onnx.GraphProto, tensor: str, scales: LayerScales, output: str) -> list[onnx.NodeProto]:
    """Adds the scale of one tensor, and the reciprocal of its smoothing vector; returns its Mul where it is smoothed, Q and DQ."""
    graph.initializer.append(numpy_helper.from_array(scales.input.reshape(()), f"{output}.scale"))
    codes, nodes = output.replace(".dequantized", ".quantized"), []
    if scales.smooth is not None:
        smoothed = output.replace(".dequantized", ".smoothed")
        graph.initializer.append(numpy_helper.from_array(np.float32(1) / scales.smooth, f"{smoothed}.factor"))
        nodes.append(helper.make_node("Mul", [tensor, f"{smoothed}.factor"], [smoothed], f"{smoothed}/Mul"))
        tensor = smoothed
    parameters = [f"{output}.scale", ZERO_INT8]
    return [
        *nodes,
        helper.make_node("QuantizeLinear", [tensor, *parameters], [codes], f"{codes}/QuantizeLinear"),
        helper.make_node("DequantizeLinear", [codes, *parameters], [output], f"{output}/DequantizeLinear"),
    ]


def is_transposed(node: onnx.NodeProto) -> bool:
    """Whether a GEMM reads its weight as [O, I]: Gemm with transB, and Conv; MatMul reads [I, O]."""
    return node.op_type == "Conv" or any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


def weight_stem(name: str, transposed: bool, taken: bool) -> str:
    """Returns the start of the names of a layer's quantized weight.

    Args:
        name: Path of the layer.
        transposed: Whether it is stored as [O, I].
        taken: Whether the graph has it in the other layout too, as of a layer that runs on a matrix and on a batch of them.
    """
    return f"{name}.weight" + (f".{'OI' if transposed else 'IO'}" if taken else "")


def _weight(
    graph: onnx.GraphProto, layout: tuple[str, bool], stem: str, weight: npt.NDArray[np.float32], scales: LayerScales
) -> onnx.NodeProto:
    """Adds codes, scales and zero-points of the weight of a layer in one layout; returns the node that dequantizes it."""
    name, transposed = layout
    axis = 0 if transposed else 1  # of the outputs
    smoothed = weight if scales.smooth is None else weight * np.expand_dims(scales.smooth, axis)
    codes = weight_codes(name, smoothed, scales.weight, axis)
    tensors = {"codes": codes, "scale": scales.weight, "zero_point": np.zeros(len(scales.weight), np.int8)}
    for suffix, array in tensors.items():
        graph.initializer.append(numpy_helper.from_array(array, f"{stem}.{suffix}"))
    inputs = [f"{stem}.{suffix}" for suffix in tensors]
    return helper.make_node("DequantizeLinear", inputs, [f"{stem}.dequantized"], f"{stem}/DequantizeLinear", axis=axis)


def weight_codes(name: str, weight: npt.NDArray[np.float32], scale_O: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.int8]:
    """Recovers the integer codes of weights that lie on the grid scale * integer.

    Args:
        name: Path of the layer, for the message.
        weight: float32 matrix, or the weight of a convolution.
        scale_O: float32 [O], one scale for each output channel.
        axis: Axis of `weight` that the output channels lie on.

    Returns:
        int8 codes of the shape of `weight`.

    Raises:
        ValueError: The scales do not fit the matrix, or a weight is no multiple of its scale within [-127, 127].
    """
    if scale_O.shape != (weight.shape[axis],):
        raise ValueError(f"{name}: {scale_O.shape} weight scales for a weight of {weight.shape[axis]} output channels")
    others = tuple(other for other in range(weight.ndim) if other != axis)
    steps = weight / np.expand_dims(scale_O, others)
    codes = np.rint(steps)
    if not (np.abs(steps - codes) <= _GRID_TOLERANCE).all() or np.abs(codes).max() > 127:
        raise ValueError(f"{name}: weights of the float graph are not scale * integer within [-127, 127]: export it from this checkpoint")
    return codes.astype(np.int8)
