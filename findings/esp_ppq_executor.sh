#!/usr/bin/env bash
# esp-ppq 1.3.12 (Espressif's fork of PPQ, which quantizes networks for ESP32), torch 2.13.0: the executor that calibrates and measures a network computes
# thirteen ONNX operators otherwise than the standard.
# The guess was that an attribute which the executor does not carry out is refused, as it refuses softcap of Attention, a GRU with
# linear_before_reset=0 and an LSTM with peepholes.
#
# Seen (2026-11-30): AveragePool counts the zeros of the padding, which count_include_pad=0, the default, leaves out: the corner of an image becomes four
# ninths of its mean. SpaceToDepth orders its channels as torch does (the channels outside, the block inside). InstanceNormalization reads no `epsilon`,
# Swish no `alpha`, ScatterElements no `reduction`, Resize no "asymmetric" where it is linear. Gather along axis -1 gives the whole tensor, Squeeze and
# Unsqueeze with two negative axes other shapes. ConvTranspose swaps pads of the height with pads of the width. Softmax before opset 13
# sums over one axis, where the standard takes all axes from `axis` on as one. A GRU with direction="reverse" runs forward, an LSTM
# reads the padding behind sequence_lens. Ranges, errors by layer and accuracies are those of the other network. Nothing warns.
# DepthToSpace, PRelu, LayerNormalization, a forward GRU, cubic and nearest Resize, and the first of these without the attribute, are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6 onnx==1.19.1 onnxruntime==1.31.1 tqdm==4.70.1 toml==0.10.2 cryptography==50.0.2 \
  flatbuffers==25.12.19 onnxsim==0.7.3 onnxscript==0.7.2 setuptools==84.2.1
"$folder/venv/bin/pip" install -qq --no-compile --no-deps esp-ppq==1.3.12
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import contextlib
import io
import sys
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper, parser

with contextlib.redirect_stdout(io.StringIO()):
    from esp_ppq.api import load_onnx_graph
    from esp_ppq.executor import TorchExecutor

PATH = sys.argv[1] + "/model.onnx"
random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape).astype(np.float32)


def integers(*values):
    return np.array(values, np.int64)


def both(opset, x, node, **initializers):
    """What ONNX Runtime and the executor of esp-ppq give for one operator."""
    text = f'<ir_version: 8, opset_import: ["": {opset}]> operator (float[{",".join(map(str, x.shape))}] x) => (float y) {{ y = {node} }}'
    model = parser.parse_model(text)
    model.graph.node[0].name = "operator"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in initializers.items())
    onnx.save(model, PATH)
    [right] = onnxruntime.InferenceSession(PATH, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    executor = TorchExecutor(load_onnx_graph(PATH), device="cpu")
    return right, executor.forward(torch.from_numpy(x.copy()))[0].detach().numpy()


IMAGE, SMALL, STEPS = normal(1, 2, 6, 6), normal(1, 1, 4, 4), normal(5, 2, 3)
ONE, ZERO, TWO_AXES = np.ones(2, np.float32), np.zeros(2, np.float32), integers(-2, -1)
weights = {"w": normal(1, 12, 3), "r": normal(1, 12, 4), "b": normal(1, 24)}
gates = {"w": normal(1, 16, 3), "r": normal(1, 16, 4), "b": normal(1, 32), "lens": np.array([5, 2], np.int32)}
wrong = {
    "AveragePool with padding": (13, IMAGE + 3, "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1]>(x)", {}),
    "SpaceToDepth": (13, IMAGE, "SpaceToDepth<blocksize=2>(x)", {}),
    "InstanceNormalization, epsilon 0.1": (13, 0.3 * IMAGE, "InstanceNormalization<epsilon=0.1>(x, s, b)", {"s": ONE, "b": ZERO}),
    "Swish, alpha 1.7": (24, IMAGE, "Swish<alpha=1.7>(x)", {}),
    "ScatterElements, add": (18, normal(4), 'ScatterElements<reduction="add">(x, i, u)', {"i": integers(1, 3), "u": ONE}),
    "Resize, linear, asymmetric": (
        13, SMALL, 'Resize<mode="linear", coordinate_transformation_mode="asymmetric">(x, , , s)', {"s": integers(1, 1, 8, 8)},
    ),
    "Gather, axis -1": (13, IMAGE, "Gather<axis=-1>(x, i)", {"i": np.array(1, np.int64)}),
    "Squeeze, axes -2 and -1": (13, normal(3, 4, 1, 1), "Squeeze(x, a)", {"a": TWO_AXES}),
    "Unsqueeze, axes -2 and -1": (13, normal(3, 4), "Unsqueeze(x, a)", {"a": TWO_AXES}),
    "ConvTranspose, pads [1, 0, 0, 1]": (13, SMALL, "ConvTranspose<strides=[2,2], pads=[1,0,0,1]>(x, w)", {"w": normal(1, 1, 3, 3)}),
    "Softmax of opset 11": (11, IMAGE, "Softmax<axis=1>(x)", {}),
    "GRU, reverse": (14, STEPS, 'GRU<hidden_size=4, direction="reverse", linear_before_reset=1>(x, w, r, b)', weights),
    "LSTM, sequence_lens": (14, STEPS, "LSTM<hidden_size=4>(x, w, r, b, lens)", gates),
}
sound = {
    "AveragePool": (13, IMAGE, "AveragePool<kernel_shape=[3,3], strides=[1,1]>(x)", {}),
    "DepthToSpace": (13, normal(1, 12, 2, 2), "DepthToSpace<blocksize=2>(x)", {}),
    "InstanceNormalization": (13, IMAGE, "InstanceNormalization(x, s, b)", {"s": ONE, "b": ZERO}),
    "Resize, cubic": (13, SMALL, 'Resize<mode="cubic">(x, , , s)', {"s": integers(1, 1, 8, 8)}),
    "Resize, nearest": (13, SMALL, 'Resize<mode="nearest">(x, , , s)', {"s": integers(1, 1, 6, 6)}),
    "LayerNormalization": (17, IMAGE, "LayerNormalization<epsilon=0.1>(x, s, b)", {"s": normal(6), "b": normal(6)}),
    "PRelu": (15, IMAGE, "PRelu(x, s)", {"s": normal(2, 1, 1)}),
    "Gather, axis 3": (13, IMAGE, "Gather<axis=3>(x, i)", {"i": np.array(1, np.int64)}),
    "ConvTranspose, pads [1, 1, 1, 1]": (13, SMALL, "ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(x, w)", {"w": normal(1, 1, 3, 3)}),
    "Softmax of opset 13": (13, IMAGE, "Softmax<axis=1>(x)", {}),
    "GRU": (14, STEPS, "GRU<hidden_size=4, linear_before_reset=1>(x, w, r, b)", weights),
}
print(f"esp-ppq {version('esp-ppq')}, torch {torch.__version__}, onnxruntime {version('onnxruntime')}")
for name, (opset, x, node, initializers) in (wrong | sound).items():
    right, seen = both(opset, x, node, **initializers)
    if right.shape == seen.shape:
        difference = np.abs(right - seen).max() / np.abs(right).max()
        print(f"{name}: off by {difference:.1%} of the largest number")
    else:
        difference = np.inf
        print(f"{name}: {seen.shape} where it is {right.shape}")
    assert difference > 0.01 if name in wrong else difference < 1e-5, f"the behaviour has changed: {name}"
PYTHON
