"""Measures how large the tensors of a graph get on calibration rows: this decides where 16 bits are enough.

    largest[t]  max over rows and elements of |t|
    sums[p]     max over rows and outputs of sum_k |a_k| |b_k|, for a product p of a and b: what any order of adding up stays below

One pass of ONNX Runtime on the CPU: each float tensor gets an Abs and a ReduceMax after it, each product a second one of absolute
values. Only those scalars leave the engine. ONNX Runtime's own rewriting of graphs is off, so that every tensor is the graph's own.

Left out: bounds on rows that were not seen; `export.graph.half_precision` keeps a share of the range in reserve for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.graph.onnx import save
from foundation.core.arrays import Features

_PRODUCTS: Final = frozenset({"MatMul", "Gemm", "Conv"})


@dataclass(frozen=True)
class Ranges:
    """Measured ranges; nan where an element was NaN."""

    largest: Mapping[str, float]
    """Keyed by the name of each float tensor, weights included."""
    sums: Mapping[str, float]
    """Keyed by the name of each MatMul, Gemm and Conv; biases are left out."""


def measure(model: onnx.ModelProto, floats: frozenset[str], batches: Iterable[Features]) -> Ranges:
    """Runs a graph on some rows.

    Args:
        model: A flat float32 or Q/DQ graph.
        floats: Names of its float32 tensors.
        batches: Arrays by input name; one batch or more.

    Raises:
        ValueError: There is no batch.
    """
    import onnxruntime

    weights = {item.name: item for item in model.graph.initializer if item.name in floats}
    watched = [name for name in _named(model.graph, floats) if name not in weights]
    products = [node.name for node in model.graph.node if node.op_type in _PRODUCTS]
    names = [*(f"{name}{_MAX}" for name in watched), *(f"{name}{_SUM}{_MAX}" for name in products)]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = save(_watched(model, watched), Path(folder) / "watched.onnx")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        rows = [np.array(session.run(names, dict(batch)), np.float64) for batch in batches]
    if not rows:
        raise ValueError("ranges need one batch of calibration rows or more; there is none")
    found = np.max(rows, axis=0).tolist()  # nan stays nan
    largest = {name: float(np.abs(numpy_helper.to_array(item)).max(initial=0.0)) for name, item in weights.items()}
    return Ranges(
        {**largest, **dict(zip(watched, found[: len(watched)], strict=True))}, dict(zip(products, found[len(watched) :], strict=True))
    )


_MAX, _SUM = ".largest", ".sums"


def _named(graph: onnx.GraphProto, floats: frozenset[str]) -> list[str]:
    """Returns the float tensors in the order of the graph."""
    values = [*(value.name for value in graph.input), *(name for node in graph.node for name in node.output)]
    return [name for name in values if name in floats]


def _watched(model: onnx.ModelProto, watched: Iterable[str]) -> onnx.ModelProto:
    """Returns the graph with the scalars as its only outputs."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    products = [node for node in graph.node if node.op_type in _PRODUCTS]
    nodes, absolute = list(graph.node), {name: f"{name}.absolute" for name in watched}
    operands = dict.fromkeys(name for node in products for name in node.input[:2])
    absolute |= {name: f"{name}.absolute" for name in operands}
    nodes += [helper.make_node("Abs", [name], [output]) for name, output in absolute.items()]
    sources = {f"{name}{_MAX}": absolute[name] for name in watched}
    for node in products:
        twin = onnx.NodeProto()
        twin.CopyFrom(node)
        twin.name, output = f"{node.name}{_SUM}", f"{node.name}{_SUM}"
        twin.input[:] = [absolute[name] for name in node.input[:2]]
        twin.output[:] = [output]
        nodes.append(twin)
        sources[f"{output}{_MAX}"] = output
    nodes += [helper.make_node("ReduceMax", [tensor], [name], keepdims=0) for name, tensor in sources.items()]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:], graph.output[:]
    graph.node.extend(kept)
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in sources)
    return made
