#!/usr/bin/env bash
# onnxslim 0.1.98, onnxsim 0.8.1, onnxscript 0.7.2, ONNX Runtime 1.31.1: optimizers of ONNX graphs turn two random draws into one. The guess was
# that nodes with the same inputs are merged only where they must give the same outputs, so that nodes that draw random numbers stay apart.
#
# Seen (2026-11-28), of two nodes without a seed and with the same input: onnxsim merges all seven kinds, onnxslim all but the two without inputs,
# the optimizer of onnxscript (torch.onnx.export runs it by default) Bernoulli and Dropout in training mode, ONNX Runtime itself Bernoulli, at its
# default level. Monte Carlo dropout of several passes in one graph then has a variance of 0, and noises that were independent cancel out. Nothing
# warns, and check_n of onnxsim cannot compare random outputs. Nodes with different seeds stay apart.
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

onnxruntime.set_default_logger_severity(3)
INPUT = np.full((64, 64), 0.3, np.float32)
NUMBERS = {"ratio": np.float32(0.5), "training": np.array(True), "zero": np.float32(0)}
DRAWS = {
    "RandomNormalLike": (["x"], {}),
    "RandomUniformLike": (["x"], {}),
    "Bernoulli": (["x"], {}),
    "Dropout": (["x", "ratio", "training"], {}),
    "Multinomial": (["x"], {"sample_size": 64}),
    "RandomNormal": ([], {"shape": [64, 64]}),
    "RandomUniform": ([], {"shape": [64, 64]}),
}
MERGED = {
    "as it is": set(),
    "ONNX Runtime": {"Bernoulli"},
    "onnxslim": {*DRAWS} - {"RandomNormal", "RandomUniform"},
    "onnxsim": {*DRAWS},
    "onnxscript": {"Bernoulli", "Dropout"},
}


def two_draws(operator, seeds=(None, None)):
    """A graph whose output is the difference of two draws."""
    inputs, attributes = DRAWS[operator]
    nodes = [
        helper.make_node(operator, inputs, [name], **attributes, **({} if seed is None else {"seed": seed}))
        for name, seed in zip("ab", seeds, strict=True)
    ]
    nodes += [helper.make_node("Cast", [name], [f"{name}_float"], to=TensorProto.FLOAT) for name in "ab"]
    nodes += [helper.make_node("Mul", ["x", "zero"], ["none"]), helper.make_node("Sub", ["a_float", "b_float"], ["d"])]
    nodes += [helper.make_node("Add", ["d", "none"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in "xy"]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in NUMBERS.items()]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def by_onnxscript(model):
    graph = onnx_ir.serde.deserialize_model(model)
    onnxscript.optimizer.optimize(graph)
    return onnx_ir.serde.serialize_model(graph)


def differ(model, tool):
    """Share of the numbers in which the draws differ."""
    tools = {"onnxslim": onnxslim.slim, "onnxsim": lambda model: onnxsim.simplify(model)[0], "onnxscript": by_onnxscript}
    options = onnxruntime.SessionOptions()
    if tool != "ONNX Runtime":
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    changed = tools[tool](model) if tool in tools else model
    session = onnxruntime.InferenceSession(changed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return float((session.run(None, {"x": INPUT})[0] != 0).mean())


print(", ".join(f"{name} {version(name)}" for name in ("onnx", "onnxruntime", "onnxslim", "onnxsim", "onnxscript")))
for tool, merged in MERGED.items():
    seen = {operator: differ(two_draws(operator), tool) for operator in DRAWS}
    print(f"{tool}: two draws differ in {', '.join(f'{share:.0%} ({operator})' for operator, share in seen.items())}")
    assert {operator for operator, share in seen.items() if share == 0} == merged, "the behaviour has changed"
    assert differ(two_draws("RandomNormalLike", (1.0, 2.0)), tool) == 1
PYTHON
