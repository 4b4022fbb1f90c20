#!/usr/bin/env bash
# tract 0.23.9 (an engine in Rust, by its Python package): Celu and Swish are computed as if their alpha were another, and Softplus and LogSoftmax
# overflow.
# The guess was that an operator which is listed as supported keeps its attributes, or that its use is refused.
#
# Seen (2026-11-29): Celu(alpha=2) divides by alpha and does not multiply by it: -1 becomes -0.39 and not -0.79. Swish(alpha=1.7) of opset 24 is
# that of 1. Softplus of 100 is infinite; LogSoftmax of 0, -1 and 100 is about -87, -87 and 0, or -inf. Elu, Selu, HardSigmoid, ThresholdedRelu and
# Shrink take theirs, as does the epsilon of LayerNormalization.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq tract==0.23.9 onnx==1.23.2 numpy==2.4.6
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnx
import tract
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

given = np.array([[-1.0, -0.25, 0.75, 1.25, 2.5, 100.0, -100.0, 0.0]], np.float32)


def answers(kind: str, attributes: dict, extra: dict) -> tuple[np.ndarray, np.ndarray]:
    """What tract and the reference of the format answer, float32 [1, 8]."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in ("x", "y")]
    constants = [numpy_helper.from_array(value, name) for name, value in extra.items()]
    graph = helper.make_graph([helper.make_node(kind, ["x", *extra], ["y"], **attributes)], "one", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.save(model, "one.onnx")
    runnable = tract.onnx().load("one.onnx").into_model().into_runnable()
    return runnable.run([given])[0].to_numpy(), ReferenceEvaluator(model).run(None, {"x": given})[0]


print(f"tract {version('tract')}")
one = {"c": np.ones(8, np.float32)}
for kind, attributes, extra, right_there in (
    ("Celu", {"alpha": 2.0}, {}, False),
    ("Celu", {"alpha": 1.0}, {}, True),
    ("Swish", {"alpha": 1.7}, {}, False),
    ("Swish", {"alpha": 1.0}, {}, True),
    ("Elu", {"alpha": 0.3}, {}, True),
    ("Selu", {"alpha": 1.2, "gamma": 0.9}, {}, True),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}, {}, True),
    ("ThresholdedRelu", {"alpha": 2.0}, {}, True),
    ("Shrink", {"bias": 0.3, "lambd": 1.0}, {}, True),
    ("LayerNormalization", {"epsilon": 0.1, "axis": -1}, one, True),
):
    found, right = answers(kind, attributes, extra)
    print(f"{kind}{attributes}: {found[0, :2].tolist()}, in the format {right[0, :2].tolist()}")
    assert np.allclose(found, right, atol=1e-4) == right_there, "the behaviour has changed"
for kind, right in (("Softplus", [0.3132617, 100.0]), ("LogSoftmax", [-101.0, 0.0])):
    found, _ = answers(kind, {}, {})
    print(f"{kind} of -1 and 100: {found[0, [0, 5]].tolist()}, rightly {right}")
    assert not np.allclose(found[0, [0, 5]], right, atol=1e-3), "the behaviour has changed"
PYTHON
