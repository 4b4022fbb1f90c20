#!/usr/bin/env bash
# onnx 1.23.2, ONNX Runtime 1.31.1: onnx.reference.ReferenceEvaluator, by which exporters and engines are judged, computes five operators wrong.
# The guess was that the reference follows the text of the standard, for each opset that it accepts.
#
# Seen (2026-11-29): BatchNormalization of opset 9 to 13, as ResNets have it, is computed in training mode, with the mean and the variance of the batch in place
# of those of the model: the answer to a row depends on its neighbours. Softmax and LogSoftmax before opset 13 sum over one axis, where the
# standard takes all axes from `axis` on as one. LRN loops over as many channels as there are rows: one image has its first channel normalized and
# the others not. LpNormalization with p=1 adds signed numbers and not their sizes. ONNX Runtime agrees with the formulas in all. Nothing warns. BatchNormalization
# of opset 14 and later, Softmax of 13, LRN of as many rows as channels (as the node tests of onnx have it) and p=2 are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

GENERATOR = np.random.default_rng(0)
onnxruntime.set_default_logger_severity(3)


def numbers(*shape: int) -> NDArray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def model(kind: str, opset: int, x: NDArray, constants: dict[str, NDArray], **attributes: float) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *constants], ["y"], **attributes)], "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)], [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)
    onnx.checker.check_model(made, full_check=True)
    return made


def normalized(x: NDArray, scale: NDArray, bias: NDArray, mean: NDArray, variance: NDArray) -> NDArray:
    scale, bias, mean, variance = (value[:, None] for value in (scale, bias, mean, variance))
    return scale * (x - mean) / np.sqrt(variance + 1e-5) + bias


def softmax(x: NDArray, axis: int) -> NDArray:
    """Softmax before opset 13: over all axes from `axis` on."""
    flat = np.exp(x.reshape(*x.shape[:axis], -1))
    return (flat / flat.sum(-1, keepdims=True)).reshape(x.shape)


def across_channels(x: NDArray, size: int, alpha: float, beta: float, bias: float) -> NDArray:
    squares = np.stack([
        (x[:, max(0, c - (size - 1) // 2): c + size // 2 + 1] ** 2).sum(1) for c in range(x.shape[1])
    ], axis=1)
    return x / (bias + alpha / size * squares) ** beta


batch = {name: numbers(3) for name in ("scale", "bias", "mean")} | {"variance": np.abs(numbers(3)) + 0.5}
x, image, square = numbers(2, 3, 4), numbers(1, 6, 3, 3), numbers(6, 6, 3, 3)
local = {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 2.0}
one, two = np.abs(x).sum(1, keepdims=True), np.sqrt((x**2).sum(1, keepdims=True))
cases = (
    *((f"BatchNormalization of opset {opset}", model("BatchNormalization", opset, x, batch), x, normalized(x, *batch.values()), opset > 13) for opset in (9, 13, 14, 15)),
    *((f"Softmax of opset {opset}, axis=1", model("Softmax", opset, x, {}, axis=1), x, softmax(x, 1), False) for opset in (7, 11, 12)),
    ("Softmax of opset 11, axis=2", model("Softmax", 11, x, {}, axis=2), x, softmax(x, 2), True),
    ("Softmax of opset 13, axis=2", model("Softmax", 13, x, {}, axis=2), x, softmax(x, 2), True),
    ("LogSoftmax of opset 11, axis=1", model("LogSoftmax", 11, x, {}, axis=1), x, np.log(softmax(x, 1)), False),
    ("LRN of 1 image, 6 channels", model("LRN", 13, image, {}, **local), image, across_channels(image, **local), False),
    ("LRN of 6 images, 6 channels", model("LRN", 13, square, {}, **local), square, across_channels(square, **local), True),
    ("LpNormalization, p=1", model("LpNormalization", 13, x, {}, axis=1, p=1), x, x / one, False),
    ("LpNormalization, p=2", model("LpNormalization", 13, x, {}, axis=1, p=2), x, x / two, True),
)
print(f"onnx {version('onnx')}, ONNX Runtime {version('onnxruntime')}; distances from the formula, relative")
for name, made, fed, right, agrees in cases:
    by_reference = ReferenceEvaluator(made).run(None, {"x": fed})[0]
    by_engine = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": fed})[0]
    distances = [float(np.linalg.norm(found - right) / np.linalg.norm(right)) for found in (by_reference, by_engine)]
    print(f"{name}: reference {distances[0]:.2g}, ONNX Runtime {distances[1]:.2g}")
    assert distances[1] < 1e-5
    assert distances[0] < 1e-5 if agrees else distances[0] > 0.01, "the behaviour has changed"
alone = ReferenceEvaluator(model("BatchNormalization", 9, x[:1], batch)).run(None, {"x": x[:1]})[0]
together = ReferenceEvaluator(model("BatchNormalization", 9, x, batch)).run(None, {"x": x})[0]
print(f"one row alone and beside another one, opset 9, reference: {alone[0, 0].round(3).tolist()}, {together[0, 0].round(3).tolist()}")
assert not np.allclose(alone[0], together[0], atol=1e-3), "the behaviour has changed"
PYTHON
