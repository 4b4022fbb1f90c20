#!/usr/bin/env bash
# onnx 1.23.2: version_converter moves every pixel of a linear Resize or Upsample. The guess was that a model raised from opset 9 or 10 to a later
# one computes the same, or is refused: that is what the converter is for.
#
# Seen (2026-11-28): Resize had no coordinate_transformation_mode before opset 11. ONNX Runtime computes it on the grid that opset 11 calls
# "asymmetric" (output place divided by scale). The converter adds the new input and no attribute, and the default of opset 11 is "half_pixel",
# another grid: an image twice as large is shifted by a quarter of an input pixel. Upsample becomes such a Resize. Hardmax keeps its axis while its meaning changed in
# opset 13. The checker passes and nothing warns; nearest stays, and Softmax is rewritten. With coordinate_transformation_mode="asymmetric" set by
# hand the converted model is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, version_converter

RAMP = np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4)
ROWS = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)
SCALES = np.array([1, 1, 1, 2], np.float32)


def model(operator, opset, scales=(), **attributes):
    inputs = ["x", *(["scales"] if len(scales) else [])]
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, ["y"], **attributes)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, None, None, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)],
        [numpy_helper.from_array(scales, "scales")] if len(scales) else [],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def answer(model, x):
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


cases = (
    ("Resize, linear", model("Resize", 10, SCALES, mode="linear"), RAMP, True),
    ("Upsample, linear", model("Upsample", 9, SCALES, mode="linear"), RAMP, True),
    ("Resize, nearest", model("Resize", 10, SCALES, mode="nearest"), RAMP, False),
    ("Hardmax, axis 1", model("Hardmax", 11, axis=1), ROWS, True),
    ("Softmax, axis 1", model("Softmax", 11, axis=1), ROWS, False),
)
print(f"onnx {onnx.__version__}, ONNX Runtime {onnxruntime.__version__}")
for name, old, x, changes in cases:
    new = version_converter.convert_version(old, 17)
    before, after = answer(old, x), answer(new, x)
    print(f"{name}, opset {old.opset_import[0].version}: {before.ravel()[:8].tolist()}")
    print(f"{name}, opset {new.opset_import[0].version}: {after.ravel()[:8].tolist()}")
    assert np.allclose(before, after, atol=1e-6) != changes, "the behaviour has changed"
    if name.endswith("linear"):
        (resize,) = (node for node in new.graph.node if node.op_type == "Resize")
        assert not any(attribute.name == "coordinate_transformation_mode" for attribute in resize.attribute), "the behaviour has changed"
        resize.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        assert np.allclose(before, answer(new, x), atol=1e-6)
PYTHON
