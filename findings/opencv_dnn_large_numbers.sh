#!/usr/bin/env bash
# OpenCV 5.0.0: its ONNX importer gives NaN for Tanh above 44, infinity for Softplus, LogSoftmax and ReduceLogSumExp of numbers whose exponential
# overflows, and reads neither `approximate` of Gelu nor `alpha` of Swish.
# The guess was that the usual stable forms are computed, as in its Softmax, Sigmoid and Mish, and that an attribute that is not known is refused.
#
# Seen (2026-11-29): tanh(45) is NaN, so that GELU by tanh, as torch.onnx.export writes it for GPT-2, is NaN at 10.5; the same graph gives 10.5 in
# the reference of onnx. A tensor of fewer numbers than a vector register holds is right. Logits of 0 and 100 have a LogSoftmax of -inf and 0
# instead of -100 and 0. Gelu(approximate="tanh") is the exact GELU (off by 2.2e-4), Swish(alpha=1.7) that of 1 (off by 0.17). Sigmoid, Softmax,
# Mish and Erf are right for the same numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq opencv-python-headless==5.0.0.93 onnx==1.23.2 numpy==2.4.6
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import cv2
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def answers(nodes: list, values: np.ndarray, numbers: dict | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What OpenCV and the reference of the format answer, float32 [1, n]."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, values.shape) for name in ("x", "y")]
    constants = [numpy_helper.from_array(np.float32(value), name) for name, value in (numbers or {}).items()]
    model = helper.make_model(helper.make_graph(nodes, "one", ends[:1], ends[1:], constants), opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.save(model, "one.onnx")
    network = cv2.dnn.readNetFromONNX("one.onnx")
    network.setInput(values)
    with np.errstate(all="ignore"):
        return network.forward(), ReferenceEvaluator(model).run(None, {"x": values})[0]


def node(kind: str, **attributes: object) -> list:
    return [helper.make_node(kind, ["x"], ["y"], **attributes)]


print(f"OpenCV {cv2.__version__}")
given = np.repeat(np.array([[-2.0, 0.5, 44.0, 45.0, 100.0]], np.float32), 64, axis=1)  # fewer numbers than a vector register holds are right
tanh, right = answers(node("Tanh"), given)
print(f"tanh of {given[0, ::64].tolist()}: {tanh[0, ::64].tolist()}")
assert np.allclose(tanh[0, :192], right[0, :192], atol=1e-6) and np.isnan(tanh[0, 192:]).all(), "the behaviour has changed"
assert np.allclose(answers(node("Tanh"), given[:, ::64])[0], right[0, ::64]), "the behaviour has changed"

parts = {"three": 3.0, "little": 0.044715, "root": 0.7978845608, "one": 1.0, "half": 0.5}
steps = ("Pow x three a", "Mul a little b", "Add x b c", "Mul c root d", "Tanh d - e", "Add e one f", "Mul x f g", "Mul g half y")
graph = [helper.make_node(kind, [name for name in names if name != "-"], [out]) for kind, *names, out in map(str.split, steps)]
given = np.repeat(np.array([[-2.0, 0.5, 9.0, 10.5, 11.0]], np.float32), 64, axis=1)
gelu, right = answers(graph, given, parts)
print(f"GELU by tanh of {given[0, ::64].tolist()}: {gelu[0, ::64].tolist()}")
assert np.allclose(gelu[0, :192], right[0, :192], atol=1e-5) and np.isnan(gelu[0, 192:]).all(), "the behaviour has changed"
assert np.allclose(right[0, 192:], given[0, 192:]), "the behaviour has changed"

given = np.array([[0.0, 1.0, 100.0] + 13 * [-1.0]], np.float32)
for kind, bad in (("Softplus", [2]), ("LogSoftmax", [0, 1, *range(3, 16)]), ("Sigmoid", []), ("Softmax", []), ("Mish", []), ("Erf", [])):
    found, right = answers(node(kind), given)
    print(f"{kind} of {given[0, :3].tolist()}: {found[0, :3].tolist()}")
    places = np.flatnonzero(~np.isclose(found[0], right[0] if kind != "LogSoftmax" else given[0] - 100, atol=1e-5))
    assert places.tolist() == bad, "the behaviour has changed"

given = np.array([[-1.75, 0.75, 1.25, 0.0]], np.float32)
for kind, given_attribute, without in (("Gelu", {"approximate": "tanh"}, {}), ("Swish", {"alpha": 1.7}, {"alpha": 1.0})):
    found, right = answers(node(kind, **given_attribute), given)
    ignored = answers(node(kind, **without), given)[1]
    print(f"{kind}{given_attribute}: off by {np.abs(found - right).max():.2g}, by {np.abs(found - ignored).max():.2g} from the one without it")
    assert np.abs(found - right).max() > 1e-4 and np.allclose(found, ignored, atol=1e-6), "the behaviour has changed"
PYTHON
