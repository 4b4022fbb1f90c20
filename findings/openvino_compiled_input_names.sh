#!/usr/bin/env bash
# OpenVINO 2026.4.1, CPU: an input of a compiled model can have another name than the same input of the model. The guess was that compiling keeps
# the names of inputs, so that `compiled.inputs[0].any_name` is a key under which callers pass arrays, as it is for the model that was read.
#
# Seen: a reshape behind an input that changes nothing is removed, and the name of its output is added to the input's names. any_name then gives
# one of them, whichever comes first in an unordered set: for the name "hidden" that one, for "view" the input's own. Both names are accepted by
# infer. So code that collects names from compiled.inputs and looks arrays up by them works or fails with the name of a tensor inside the model
# (torch's exporter names such a reshape "view"). `model.inputs[0].any_name`, and the order of inputs, stay as they were.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import openvino
from openvino import opset13 as ops


def model(inner):
    ids = ops.parameter([-1, 4], np.int64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    same = ops.reshape(ids, np.array([-1, 4], np.int64), special_zero=False)
    same.output(0).set_names({inner})
    y = ops.multiply(ops.convert(same, "f32"), np.float32(2))
    y.output(0).set_names({"y"})
    return openvino.Model([y], [ids], "small")


version = openvino.get_version().partition("-")[0]
for inner, expected in (("hidden", "hidden"), ("a", "a"), ("view", "input_ids")):
    read = model(inner)
    compiled = openvino.Core().compile_model(read, "CPU")
    names = read.inputs[0].any_name, compiled.inputs[0].any_name
    print(f"openvino {version}, reshape named {inner}: the model's input is {names[0]}, the compiled model's {names[1]}")
    assert names == ("input_ids", expected), "the behaviour has changed"
    assert compiled.inputs[0].names == {"input_ids", inner}, "the behaviour has changed"
    values = np.arange(8).reshape(2, 4)
    for name in ("input_ids", inner):
        assert (compiled({name: values})["y"] == 2 * values).all(), "the behaviour has changed"
PYTHON
