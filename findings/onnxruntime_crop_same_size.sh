#!/usr/bin/env bash
# ONNX Runtime 1.31.1: a crop that is enlarged to the size of its picture is the whole picture.
# The guess was that Resize with "tf_crop_and_resize" reads its region for every size, as the standard says and as onnx.reference 1.23.2 computes.
#
# Seen (2026-11-30): where an axis keeps its length, the region of that axis is ignored. The inner 60 % of a picture of 6 x 6, enlarged to 6 x 6, is
# the picture itself; enlarged to 6 x 12, it is cropped in its width alone. To 12 x 12 and 4 x 4 it is right, so that the crop of one model
# is right or missing by the size of the picture that comes in. "linear", "nearest" and "cubic" alike, with scales and with sizes, with and without
# optimization. Nothing warns. Zooming into the middle at the same resolution, as test-time augmentation and digital zoom do, is such a crop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

SIDE, START, END = 6, 0.2, 0.8
print(f"ONNX Runtime {onnxruntime.__version__}, onnx {onnx.__version__}")
image = np.arange(SIDE * SIDE, dtype=np.float32).reshape(1, 1, SIDE, SIDE)
region = np.array([0, 0, START, START, 1, 1, END, END], np.float32)


def cropped(mode, height, width, by, level):
    """The crop at a new size: by ONNX Runtime, by the reference, and by the standard's formula if it is linear."""
    wanted = {"sizes": np.array([1, 1, height, width]), "scales": np.array([1, 1, height / SIDE, width / SIDE], np.float32)}[by]
    constants = {"region": region, "wanted": wanted}
    inputs = ["x", "region", "", "wanted"] if by == "sizes" else ["x", "region", "wanted"]
    node = helper.make_node("Resize", inputs, ["y"], mode=mode, coordinate_transformation_mode="tf_crop_and_resize")
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, height, width])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rows, columns = ((START + (END - START) * np.arange(length) / (length - 1)) * (SIDE - 1) for length in (height, width))
    return session.run(None, {"x": image})[0][0, 0], ReferenceEvaluator(model).run(None, {"x": image})[0][0, 0], rows[:, None] * SIDE + columns


levels = onnxruntime.GraphOptimizationLevel
for height, width in ((12, 12), (4, 4), (6, 12), (6, 6)):
    for mode in ("linear", "nearest", "cubic"):
        for by in ("sizes", "scales"):
            for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL):
                seen, reference, formula = cropped(mode, height, width, by, level)
                if mode == "linear":
                    assert np.allclose(reference, formula, atol=1e-4)
                whole = height == SIDE and width == SIDE
                assert np.array_equal(seen, image[0, 0]) == whole, "the behaviour has changed"
                assert (np.abs(seen - reference).max() > 5) == (height == SIDE), "the behaviour has changed"
    seen, _, formula = cropped("linear", height, width, "sizes", levels.ORT_ENABLE_ALL)
    print(f"{height} x {width}, linear: corners {seen[0, 0]:.1f} and {seen[-1, -1]:.1f}, of the crop {formula[0, 0]:.1f} and {formula[-1, -1]:.1f}")
PYTHON
