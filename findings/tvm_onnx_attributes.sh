#!/usr/bin/env bash
# Apache TVM 0.27.0.post1 (its ONNX importer, tvm.relax.frontend.onnx): four kinds of attributes that decide an answer are not carried out, and NaN
# becomes 0.
# The guess was that an attribute which is not carried out is refused, as LSTM, Celu and Attention in its four-dimensional form are.
#
# Seen (2026-11-30): ConvTranspose ignores output_shape, by which exporters of segmentation models and TensorFlow say the size: 13 x 13 comes out
# where 14 x 14 is written. Resize ignores antialias, so that a picture at half the size is the one without. IsInf ignores detect_positive and
# detect_negative. ReduceLogSum and ReduceSumSquare with noop_with_empty_axes=1 and no axes reduce over nothing, as they have to, and leave out the
# logarithm and the square. Relu of NaN is 0, and Max of 1 and NaN is 1 or NaN, by their order: a model that has broken down answers as if nothing
# were. Nothing warns. ONNX Runtime 1.31.1 has all of them right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile apache-tvm==0.27.0.post1 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6 ml-dtypes==0.5.4
TVM_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

print(f"TVM {version('apache-tvm')}, ONNX Runtime {onnxruntime.__version__}")
random = np.random.default_rng(0)
images = random.normal(size=(1, 4, 6, 6)).astype(np.float32)
kernel = random.normal(size=(4, 2, 3, 3)).astype(np.float32)
table = np.abs(random.normal(size=(3, 5))).astype(np.float32)
halves = np.array([1, 1, 0.5, 0.5], np.float32)
infinite = np.array([1, np.inf, -np.inf], np.float32)
nan = np.array([1, np.nan, 2], np.float32)
none = np.array([], np.int64)


def answers(operator, array, inputs, constants, attributes):
    """The output of one node in TVM and in ONNX Runtime."""
    node = helper.make_node(operator, inputs, ["y"], **attributes)
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    given = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)]
    graph = helper.make_graph([node], "g", given, [onnx.ValueInfoProto(name="y")], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    onnx.checker.check_model(model)
    right = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": array})[0]
    module = relax.transform.LegalizeOps()(relax.transform.DecomposeOpsForInference()(from_onnx(model, keep_params_in_input=False)))
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(array)).numpy(), right


transposed = ("ConvTranspose", images, ["x", "w"], {"w": kernel})
cases = [
    ("ConvTranspose, strides", False, *transposed, dict(strides=[2, 2])),
    ("ConvTranspose, output_padding", False, *transposed, dict(strides=[2, 2], output_padding=[1, 1])),
    ("ConvTranspose, output_shape", True, *transposed, dict(strides=[2, 2], output_shape=[14, 14])),
    ("Resize, linear", False, "Resize", images, ["x", "", "s"], {"s": halves}, dict(mode="linear")),
    ("Resize, antialias", True, "Resize", images, ["x", "", "s"], {"s": halves}, dict(mode="linear", antialias=1)),
    ("IsInf", False, "IsInf", infinite, ["x"], {}, {}),
    ("IsInf, negative ones", True, "IsInf", infinite, ["x"], {}, dict(detect_positive=0)),
    ("IsInf, positive ones", True, "IsInf", infinite, ["x"], {}, dict(detect_negative=0)),
    ("ReduceSumSquare over rows", False, "ReduceSumSquare", table, ["x", "a"], {"a": np.array([0])}, {}),
    ("ReduceSumSquare, no axes", True, "ReduceSumSquare", table, ["x", "a"], {"a": none}, dict(noop_with_empty_axes=1)),
    ("ReduceLogSum, no axes", True, "ReduceLogSum", table, ["x", "a"], {"a": none}, dict(noop_with_empty_axes=1)),
    ("Relu of NaN", True, "Relu", nan, ["x"], {}, {}),
    ("Max with NaN", True, "Max", nan, ["x", "b"], {"b": np.array([np.nan, 1, 3], np.float32)}, {}),
]
for name, wrong, *case in cases:
    seen, right = answers(*case)
    shown = [f"{list(array.shape)} {np.round(array.ravel()[:3].astype(float), 2).tolist()}" for array in (seen, right)]
    print(f"{name}: TVM {shown[0]}, ONNX Runtime {shown[1]}")
    same = seen.shape == right.shape and np.allclose(seen.astype(float), right.astype(float), rtol=1e-3, atol=1e-4, equal_nan=True)
    assert same != wrong, "the behaviour has changed"
plain = answers("Resize", images, ["x", "", "s"], {"s": halves}, dict(mode="linear"))[0]
assert np.array_equal(plain, answers("Resize", images, ["x", "", "s"], {"s": halves}, dict(mode="linear", antialias=1))[0]), "the behaviour has changed"
PYTHON
