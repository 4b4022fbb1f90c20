#!/usr/bin/env bash
# MNN 3.6.1: a quantized ONNX graph (Q/DQ) is computed with inputs that are not rounded, and the exact GELU becomes the one by tanh.
# The guess was that Q/DQ in front of a product either becomes an int8 product or stays a rounding, and that float operators keep their meaning.
#
# Seen (2026-11-29): x -> QuantizeLinear -> DequantizeLinear -> MatMul with int8 weights per column gives exactly the product of x itself: what is
# measured there says nothing of the int8 model (0.2 off the graph's answer here). Gelu, and x * (1 + erf(x / sqrt 2)) / 2 as exporters write it,
# are the form by tanh (4.4e-4). Round takes 2.5 to 3, where ONNX says 2; Mod(fmod=1) has the sign of the divisor; Softplus of 100 is 87;
# Shrink(bias=0.3, lambd=1) loses negative numbers (2.7 off at -3). LayerNormalization, Softmax, Erf, Selu, Celu and HardSigmoid with their
# attributes are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq MNN==3.6.1 onnx==1.23.2 numpy==2.4.6
cd "$folder"
OMP_NUM_THREADS=1 PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import subprocess
from importlib.metadata import version

import MNN.expr as expr
import MNN.nn
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

generator = np.random.default_rng(0)


def convert(nodes: list, inputs: tuple, output: tuple, numbers: dict, opset: int) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs), helper.make_tensor_value_info("y", TensorProto.FLOAT, output)]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in numbers.items()]
    model = helper.make_model(helper.make_graph(nodes, "one", ends[:1], ends[1:], constants), opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, "one.onnx")
    command = ["mnnconvert", "-f", "ONNX", "--modelFile", "one.onnx", "--MNNModel", "one.mnn", "--bizCode", "one"]
    subprocess.run(command, check=True, capture_output=True)
    return model


def answers(nodes: list, values: np.ndarray, width: int, numbers: dict | None = None, opset: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """What MNN and the reference of the format answer, float32 [n, width]."""
    model = convert(nodes, values.shape, (len(values), width), numbers or {}, opset)
    network = MNN.nn.load_module_from_file("one.mnn", ["x"], ["y"])
    (found,) = network.forward([expr.const(values, [*values.shape], expr.NCHW)])
    right = ReferenceEvaluator(model).run(None, {"x": values})[0]
    return np.array(expr.convert(found, expr.NCHW).read()).reshape(right.shape), right


print(f"MNN {version('MNN')}")
weights, scales = generator.integers(-127, 128, (16, 8)).astype(np.int8), generator.uniform(0.01, 0.05, 8).astype(np.float32)
given = generator.normal(size=(4, 16)).astype(np.float32)
quantized = [
    helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["codes"]),
    helper.make_node("DequantizeLinear", ["codes", "step", "zero"], ["rounded"]),
    helper.make_node("DequantizeLinear", ["weights", "scales", "zeros"], ["matrix"], axis=1),
    helper.make_node("MatMul", ["rounded", "matrix"], ["y"]),
]
numbers = {"step": np.float32(0.02), "zero": np.int8(0), "weights": weights, "scales": scales, "zeros": np.zeros(8, np.int8)}
found, right = answers(quantized, given, 8, numbers, opset=19)
unrounded = given @ (weights * scales)
print(f"Q/DQ: off by {np.abs(found - right).max():.3f}, by {np.abs(found - unrounded).max():.1e} from the product of the float input")
assert np.abs(found - right).max() > 0.05 and np.allclose(found, unrounded, atol=1e-5), "the behaviour has changed"

given = np.array([[-1.75, -0.25, 0.75, 1.25, 2.5, 100.0, -3.0, 0.0]], np.float32)
for kind, attributes, extra, off in (
    ("Gelu", {}, {}, (1e-4, 1e-3)),
    ("Round", {}, {}, (1, 1)),
    ("Mod", {"fmod": 1}, {"c": np.float32(1.5)}, (1.4, 1.6)),
    ("Softplus", {}, {}, (12.9, 13.1)),
    ("Shrink", {"bias": 0.3, "lambd": 1.0}, {}, (1, 10)),
    ("LayerNormalization", {"epsilon": 0.1, "axis": -1}, {"c": np.ones(8, np.float32)}, None),
    ("Softmax", {}, {}, None),
    ("Erf", {}, {}, None),
    ("Selu", {"alpha": 1.2, "gamma": 0.9}, {}, None),
    ("Celu", {"alpha": 2.0}, {}, None),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}, {}, None),
):
    with np.errstate(all="ignore"):
        found, right = answers([helper.make_node(kind, ["x", *extra], ["y"], **attributes)], given, 8, extra)
    apart = float(np.abs(found - right).max())
    print(f"{kind}{attributes or ''}: off by {apart:.2g}")
    assert apart < 1e-5 if off is None else off[0] <= apart <= off[1], "the behaviour has changed"
PYTHON
