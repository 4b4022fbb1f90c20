#!/usr/bin/env bash
# IREE 3.13.0 (iree-base-compiler and -runtime, CPU): ONNX models with uint8 are computed as if the bytes had a sign, and a batched QLinearMatMul
# loses its zero points.
# The guess was that types are kept or refused, as an unknown operator is: images and activations of ONNX Runtime's quantizer are uint8.
#
# Seen (2026-11-30): float 200 cast to uint8 and back is 127. The MaxPool of 200, 3, 250 and 7 is 7. 200 / 3 is 238, and Clip between 10
# and 220 makes 220 of 3, 7, 200 and 250. MatMulInteger of two uint8 matrices without zero points multiplies 200 as -56. QLinearMatMul of
# matrices is right, with one more axis (batch or heads) it subtracts no zero point. Outputs of uint8 arrive in NumPy as int8, so that 210
# is -46. All compile, and nothing warns. QuantizeLinear with DequantizeLinear, Max, ReduceMax, and a cast from uint8 to float are right.
# ONNX Runtime 1.31.1 has all of them right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq iree-base-compiler==3.13.0 iree-base-runtime==3.13.0 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import iree.compiler
import iree.runtime
import numpy as np
import onnxruntime
from iree.compiler.tools.import_onnx.__main__ import main, parse_arguments
from onnx import TensorProto, helper, numpy_helper

print(f"iree-base-compiler {version('iree-base-compiler')}, ONNX Runtime {onnxruntime.__version__}")
FLOAT, UINT8, INT32 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT32
node = helper.make_node


def answers(nodes, feeds, kind, shape, constants=()):
    """The output y of a graph in IREE and in ONNX Runtime."""
    inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in feeds.items()]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in dict(constants).items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", kind, shape)], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    with open("model.onnx", "wb") as file:
        file.write(model.SerializeToString())
    main(parse_arguments(["model.onnx", "-o", "model.mlir"]))
    options = dict(input_type="onnx", target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=generic"])
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    module = iree.runtime.VmModule.copy_buffer(context.instance, iree.compiler.tools.compile_file("model.mlir", **options))
    context.add_vm_module(module)
    name = next(name for name in module.function_names if not name.startswith("__") and not name.endswith("$async"))
    return getattr(context.modules, module.name)[name](*feeds.values()).to_host(), expected


def to_float(*nodes):
    return [*nodes, node("Cast", ["c"], ["y"], to=FLOAT)]


image = np.array([[200, 3], [250, 7]], np.uint8)
floats = np.array([200, 3, 127, 128], np.float32)
column = np.array([[200], [255]], np.uint8)
signed = np.array([[1, 2], [3, 4]], np.int8)
product = [node("QLinearMatMul", ["a", "s", "z", "b", "s", "z", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
one = {"s": np.float32(1), "z": np.int8(1)}
step = {"s": np.float32(1), "z": np.uint8(10)}
pixels = image.reshape(1, 1, 2, 2)
cases = [
    ("uint8 to float", False, [node("Cast", ["x"], ["y"], to=FLOAT)], {"x": image}, FLOAT, [2, 2], {}),
    ("quantize and back", False, [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
     {"x": floats}, FLOAT, [4], step),
    ("Max", False, to_float(node("Max", ["x", "b"], ["c"])), {"x": image}, FLOAT, [2, 2], {"b": np.uint8(100)}),
    ("QLinearMatMul, matrices", False, product, {"a": signed, "b": signed}, FLOAT, [2, 2], one),
    ("float to uint8 and back", True, to_float(node("Cast", ["x"], ["c"], to=UINT8)), {"x": floats}, FLOAT, [4], {}),
    ("MaxPool", True, to_float(node("MaxPool", ["x"], ["c"], kernel_shape=[2, 2])), {"x": pixels}, FLOAT, [1, 1, 1, 1], {}),
    ("Div by 3", True, to_float(node("Div", ["x", "b"], ["c"])), {"x": image}, FLOAT, [2, 2], {"b": np.uint8(3)}),
    ("Clip, 10 to 220", True, to_float(node("Clip", ["x", "l", "h"], ["c"])), {"x": image}, FLOAT, [2, 2], {"l": np.uint8(10), "h": np.uint8(220)}),
    ("MatMulInteger", True, [node("MatMulInteger", ["x", "b"], ["y"])], {"x": image, "b": column}, INT32, [2, 1], {}),
    ("QLinearMatMul, batch", True, product, {"a": signed[None], "b": signed[None]}, FLOAT, [1, 2, 2], one),
]
for name, wrong, nodes, feeds, kind, shape, constants in cases:
    seen, expected = answers(nodes, feeds, kind, shape, constants)
    print(f"{name}: IREE {seen.ravel().tolist()}, ONNX Runtime {expected.ravel().tolist()}")
    assert (seen.tolist() != expected.tolist()) == wrong, "the behaviour has changed"
codes, expected = answers([node("QuantizeLinear", ["x", "s", "z"], ["y"])], {"x": floats}, UINT8, [4], step)
print(f"codes: IREE {codes.dtype} {codes.tolist()}, ONNX Runtime {expected.dtype} {expected.tolist()}")
assert codes.dtype == np.int8 and codes.view(np.uint8).tolist() == expected.tolist(), "the behaviour has changed"
PYTHON
