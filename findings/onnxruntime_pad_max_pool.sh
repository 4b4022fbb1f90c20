#!/usr/bin/env bash
# ONNX Runtime 1.31.1, onnxoptimizer 0.4.2: zeros around an image are lost before a max pool. The guess was that an optimizer at the default level keeps
# what a graph computes, and moves padding into a pool where both pad with the same number.
#
# Seen (2026-11-29): a Pad with zeros and a MaxPool become one MaxPool with `pads`, which stand for minus infinity, in ONNX Runtime from the level BASIC
# on. Where all numbers of a window are negative its maximum was 0 and is now negative: at the edges of maps of -3 +- 1 the answers are off by 2.6,
# and by 4.0 where the pool has a padding of its own. Behind a ReLU nothing changes, so that many networks show nothing; networks that pool before
# their first activation (BiT and ViT hybrid in Transformers 5.23 begin with Conv, Pad, MaxPool) get other answers. Nothing warns. Padding with
# another number than 0, or auto_pad in the pool, stays. onnxsim 0.8.1 keeps both nodes. ORT_DISABLE_ALL is right, and so is the reference of onnx.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile onnxruntime==1.31.1 onnxoptimizer==0.4.2 onnxsim==0.8.1 onnx==1.23.2 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import numpy as np
import onnx
import onnxoptimizer
import onnxruntime
import onnxsim
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

Level = onnxruntime.GraphOptimizationLevel
generator = np.random.default_rng(0)
negative = generator.standard_normal((1, 2, 6, 6)).astype(np.float32) - 3
positive = np.maximum(generator.standard_normal((1, 2, 6, 6)).astype(np.float32), 0)


def graph(value, shape, **attributes):
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in (("x", [1, 2, 6, 6]), ("y", shape))]
    constants = [helper.make_tensor("edges", TensorProto.INT64, [8], [0, 0, 1, 1, 0, 0, 1, 1]), helper.make_tensor("value", TensorProto.FLOAT, [], [value])]
    nodes = [helper.make_node("Pad", ["x", "edges", "value"], ["t"]), helper.make_node("MaxPool", ["t"], ["y"], kernel_shape=[3, 3], **attributes)]
    model = helper.make_model(helper.make_graph(nodes, "g", edges[:1], edges[1:], constants), opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model, rows, level=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2
    if level is not None:
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {"x": rows})[0]


def off(model, rows, right, level):
    return float(np.abs(run(model, rows, level) - right).max())


print(*(f"{name} {version(name)}" for name in ("onnxruntime", "onnxoptimizer", "onnxsim", "onnx")))
cases = {
    "zeros, pool": (graph(0.0, [1, 2, 6, 6]), negative, True),
    "zeros, pool with a padding": (graph(0.0, [1, 2, 8, 8], pads=[1, 1, 1, 1]), negative, True),
    "zeros, pool, behind a ReLU": (graph(0.0, [1, 2, 6, 6]), positive, False),
    "ones, pool": (graph(1.0, [1, 2, 6, 6]), negative, False),
}
for name, (model, rows, wrong) in cases.items():
    right = ReferenceEvaluator(model).run(None, {"x": rows})[0]
    levels = {"none": off(model, rows, right, Level.ORT_DISABLE_ALL), "basic": off(model, rows, right, Level.ORT_ENABLE_BASIC), "default": off(model, rows, right, None)}
    others = {tool: off(other, rows, right, Level.ORT_DISABLE_ALL) for tool, other in (("onnxoptimizer", onnxoptimizer.optimize(model)), ("onnxsim", onnxsim.simplify(model)[0]))}
    print(f"{name}: off by", levels | others)
    assert levels["none"] == others["onnxsim"] == 0 and all((error > 2) == wrong for error in (levels["basic"], levels["default"], others["onnxoptimizer"])), "the behaviour has changed"
PYTHON
