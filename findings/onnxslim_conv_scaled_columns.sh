#!/usr/bin/env bash
# onnxslim 0.1.98: a factor for each column behind a convolution becomes a factor for each channel, where there are as many columns as channels.
# The guess was that a Mul is folded into the weights of the Conv only where it has one factor a channel, and that shapes tell.
#
# Seen (2026-11-28): the fusion counts the factors and does not look along which axis they lie. A window over 64 columns (shape [64]) behind a
# convolution of 64 channels is folded as if it were [64, 1, 1]; a factor for each row ([64, 1]) as well, and the time steps of a 1-D convolution.
# Sizes are right, numbers are not, and nothing warns. With 63 or 65 columns the answers are the model's own; onnxsim 0.8.1, onnxscript 0.7.2 and
# ONNX Runtime 1.31.1 keep them for all sizes. So one checkpoint exported for images of 64 pixels is damaged, and for 96 it is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq onnx==1.23.2 onnxruntime==1.31.1 onnxslim==0.1.98 onnxsim==0.8.1 onnxscript==0.7.2 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import onnxscript.optimizer
import onnxsim
import onnxslim
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import GraphOptimizationLevel

GENERATOR = np.random.default_rng(0)
onnxruntime.set_default_logger_severity(3)


def by_onnxscript(model):
    graph = onnx_ir.serde.deserialize_model(model)
    onnxscript.optimizer.optimize(graph)
    return onnx_ir.serde.serialize_model(graph)


def scaled_convolution(sizes, factors):
    """A convolution of 64 channels, 1 wide, and a Mul behind it."""
    weights = GENERATOR.standard_normal((64, 3, *[1] * len(sizes))).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "weights"], ["t"]), helper.make_node("Mul", ["t", "factors"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, *sizes]) for name, channels in (("x", 3), ("y", 64))]
    constants = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(factors, "factors")]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def answer(model, x, level=GraphOptimizationLevel.ORT_DISABLE_ALL):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


print(", ".join(f"{name} {version(name)}" for name in ("onnxslim", "onnxsim", "onnxscript", "onnxruntime")))
cases = (
    ((64, 63), (63,), False),
    ((64, 64), (64,), True),
    ((64, 64), (64, 1), True),
    ((64, 64), (64, 1, 1), False),
    ((64, 64), (64, 64), False),
    ((64,), (64,), True),
    ((65,), (65,), False),
)
for sizes, shape, damaged in cases:
    factors = np.hanning(np.prod(shape) + 2)[1:-1].reshape(shape).astype(np.float32)
    model, x = scaled_convolution(sizes, factors), GENERATOR.standard_normal((1, 3, *sizes)).astype(np.float32)
    right = answer(model, x)
    others = (onnxsim.simplify(model)[0], by_onnxscript(model))
    assert all(np.allclose(answer(other, x), right, atol=1e-5) for other in others)
    assert np.allclose(answer(model, x, GraphOptimizationLevel.ORT_ENABLE_ALL), right, atol=1e-5)
    off = float(np.linalg.norm(answer(onnxslim.slim(model), x) - right) / np.linalg.norm(right))
    print(f"64 channels, {sizes} places, factors of shape {shape}: onnxslim is off by {off:.0%}")
    assert (off > 0.1) == damaged, "the behaviour has changed"
PYTHON
