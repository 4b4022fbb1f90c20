#!/usr/bin/env bash
# tinygrad 0.14.0 (its ONNX importer, tinygrad.nn.onnx): grouped heads get the wrong keys, a causal step with a cache sees the first token alone, and the
# second call reuses small inputs of the first one.
# The guesses were that head h of H reads key head h // (H / K), as in ONNX, Llama and every other engine; that causality counts from the end of the
# cache; and that the second call computes with the inputs of the second call.
#
# Seen (2026-11-30): Attention of opset 23 repeats the key heads as a whole, so that with 4 heads on 2 the order is 0, 1, 0, 1 where it
# should be 0, 0, 1, 1. With is_causal=1 and past keys, the mask starts at the first past token: each new token of a decoder is an answer
# to the first one, and the prompt is ignored. Inputs that tinygrad needs as Python numbers (k of TopK, bounds of Slice, shapes, axes,
# lengths of Range) are cached by name at the first call: a second call with the bounds 4 and 6 returns columns 0 and 1 again. And
# QuantizeLinear to uint8 with the zero point 128 rounds 0.5, 2.5 and 4.5 up, where ONNX rounds to even. Nothing warns. Attention without
# groups and without a cache is right, and so is each first call. ONNX Runtime 1.31.1 has all of them right.
# The device PYTHON needs no compiler; the importer is the same for all devices.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq tinygrad==0.14.0 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
cd "$folder"
DEV=PYTHON "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tinygrad.nn.onnx import OnnxRunner

generator = np.random.default_rng(0)
print(f"tinygrad {version('tinygrad')}, ONNX Runtime {onnxruntime.__version__}")


def engines(node, inputs, constants=(), output=TensorProto.FLOAT):
    """The first output of one node in tinygrad and in ONNX Runtime, each loaded once and called in turn."""
    types = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    values = [helper.make_tensor_value_info(name, types[str(array.dtype)], array.shape) for name, array in inputs.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in dict(constants).items()]
    outputs = [helper.make_tensor_value_info(node.output[0], output, None)]
    model = helper.make_model(helper.make_graph([node], "g", values, outputs, tensors), opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with open("model.onnx", "wb") as file:
        file.write(model.SerializeToString())
    runner = OnnxRunner("model.onnx")
    return (lambda feed: runner(feed)[node.output[0]].numpy()), (lambda feed: session.run(None, feed)[0])


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


query, key, value = (generator.normal(size=(1, heads, 6, 8)).astype(np.float32) for heads in (4, 2, 2))
feed = dict(q=query, k=key, v=value)
right = {}
for name, order in (("0, 0, 1, 1", [0, 0, 1, 1]), ("0, 1, 0, 1", [0, 1, 0, 1])):
    right[name] = softmax(query @ key[:, order].swapaxes(2, 3) / np.sqrt(8)) @ value[:, order]
seen, other = (engine(feed) for engine in engines(helper.make_node("Attention", list("qkv"), ["y"]), feed))
for name, answer in right.items():
    print(f"4 heads on the key heads {name}: tinygrad off by {np.abs(seen - answer).max():.1e}, ONNX Runtime by {np.abs(other - answer).max():.1e}")
assert np.allclose(other, right["0, 0, 1, 1"], atol=1e-5)
assert np.allclose(seen, right["0, 1, 0, 1"], atol=1e-5) and not np.allclose(seen, other, atol=0.1), "the behaviour has changed"

single = dict(q=query[:, :2], k=key, v=value)
seen, other = (engine(single) for engine in engines(helper.make_node("Attention", list("qkv"), ["y"], is_causal=1), single))
print(f"no groups, no cache, causal: tinygrad and ONNX Runtime differ by {np.abs(seen - other).max():.1e}")
assert np.allclose(seen, other, atol=1e-5)

step = dict(q=query[:, :2, 5:], k=key[:, :, 5:], v=value[:, :, 5:], past_k=key[:, :, :5], past_v=value[:, :, :5])
node = helper.make_node("Attention", ["q", "k", "v", "", "past_k", "past_v"], ["y", "present_k", "present_v"], is_causal=1)
decoded, expected = (engine(step) for engine in engines(node, step))
print(f"one causal step after 5 tokens: tinygrad is off by {np.abs(decoded - other[:, :, 5:]).max():.1e} from the last row of the whole text, by "
      f"{np.abs(decoded - value[:, :, :1]).max():.1e} from the first token's value; ONNX Runtime by {np.abs(expected - other[:, :, 5:]).max():.1e}")
assert np.allclose(expected, other[:, :, 5:], atol=1e-5)
assert np.allclose(decoded, value[:, :, :1], atol=1e-6), "the behaviour has changed"

table = np.arange(8, dtype=np.float32).reshape(1, 8)
feeds = [dict(x=table, start=np.array([low]), end=np.array([high])) for low, high in ((0, 2), (4, 6))]
pair = engines(helper.make_node("Slice", ["x", "start", "end", "axis"], ["y"]), feeds[0], {"axis": np.array([1])})
answers = [[engine(one).tolist() for one in feeds] for engine in pair]
print(f"columns 0 to 1, then 4 to 5: tinygrad {answers[0]}, ONNX Runtime {answers[1]}")
assert answers[1] == [[[0, 1]], [[4, 5]]] and answers[0] == [[[0, 1]], [[0, 1]]], "the behaviour has changed"
feeds = [dict(x=table, k=np.array([k])) for k in (2, 3)]
answers = [[engine(one).shape[1] for one in feeds] for engine in engines(helper.make_node("TopK", ["x", "k"], ["y", "i"]), feeds[0])]
print(f"TopK with k=2, then k=3: columns of tinygrad {answers[0]}, of ONNX Runtime {answers[1]}")
assert answers == [[2, 2], [2, 3]], "the behaviour has changed"

halves = dict(x=np.array([0.5, 1.5, 2.5, 3.5, 4.5], np.float32))
node, constants = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"]), {"scale": np.float32(1), "zero": np.uint8(128)}
codes = [(engine(halves).astype(int) - 128).tolist() for engine in engines(node, halves, constants, TensorProto.UINT8)]
print(f"uint8 codes of 0.5 ... 4.5 less the zero point: tinygrad {codes[0]}, ONNX Runtime {codes[1]}")
assert codes == [[1, 2, 3, 4, 5], [0, 2, 2, 4, 4]], "the behaviour has changed"
PYTHON
