#!/usr/bin/env bash
# onnx2torch 1.5.15, torch 2.13.0: the converted model counts positions from the end, and resizes on another grid.
# The guess was that an attribute that is left out has the default of ONNX, and that an attribute that is not carried out is refused, as the alpha
# of Selu is.
#
# Seen (2026-11-29): CumSum without `reverse`, as torch.onnx.export(dynamo=False) writes it, sums from the end. RoBERTa, XLM-R and MPNet number their
# tokens with it, so that each token has the position of another one; in a text of odd length the middle alone is right. The newer exporter writes
# reverse=0, which is right. Resize with coordinate_transformation_mode="asymmetric" has the grid of "half_pixel" where it is linear, and the place
# rounded down where it is nearest, whatever nearest_mode says. PRelu with a slope for each column has one for each channel if there are as many.
# NonZero is transposed. Nothing warns, and shapes are right but for NonZero's. 339 of the 349 node tests of onnx that it converts agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$folder/venv/bin/pip" install -qq --no-deps onnx2torch==1.5.15
# The wheels of torchvision are built for CUDA; onnx2torch imports two names of it, which no graph here uses.
mkdir -p "$folder/stub/torchvision"
touch "$folder/stub/torchvision/__init__.py"
echo "nms = roi_align = None" >"$folder/stub/torchvision/ops.py"
cd "$folder"
PYTHONPATH="$folder/stub" OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx2torch import convert
from torch import Tensor, nn

GENERATOR = np.random.default_rng(0)


class Embedder(nn.Module):
    """Numbers its tokens as RoBERTa does, and takes the mean of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(40, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.cumsum(mask, 1) * mask + 1
        states = torch.tanh(self.tokens(ids) + self.positions(places)) * mask.unsqueeze(-1)
        return states.sum(1) / mask.sum(1, keepdim=True)


def by_onnxruntime(model: onnx.ModelProto, feed: dict[str, NDArray]) -> NDArray:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]


def by_onnx2torch(model: onnx.ModelProto, feed: dict[str, NDArray]) -> NDArray:
    with torch.no_grad():
        return convert(model).eval()(*(torch.from_numpy(value.copy()) for value in feed.values())).numpy()


def node(kind: str, opset: int, constants: dict[str, NDArray], inputs: str = "x", **attributes: object) -> onnx.ModelProto:
    """A model of one operator; `inputs` are its inputs in order, "x" the one that is fed."""
    output, axes = (TensorProto.INT64, 2) if kind == "NonZero" else (TensorProto.FLOAT, 4 if kind == "Resize" else 3)
    graph = helper.make_graph(
        [helper.make_node(kind, inputs.split(","), ["y"], **attributes)], "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * max(axes, 3))],
        [helper.make_tensor_value_info("y", output, [None] * axes)], [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def numbers(*shape: int) -> NDArray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def resize(**attributes: str) -> onnx.ModelProto:
    return node("Resize", 13, {"scales": np.float32([1, 1, 2, 2])}, inputs="x,,scales", **attributes)


torch.manual_seed(0)
embedder = Embedder().eval()
ids, mask = torch.randint(0, 50, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
mask[1, 5:] = 0
print(f"onnx2torch {version('onnx2torch')}")
torch.onnx.export(embedder, (ids, mask), "one.onnx", input_names=["ids", "mask"], opset_version=17, dynamo=False)
model, feed = onnx.load("one.onnx"), {"ids": ids.numpy(), "mask": mask.numpy()}
found, right = by_onnx2torch(model, feed), by_onnxruntime(model, feed)
cosines = (found * right).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(right, axis=1)
print(f"embedder: cosines of its vectors with ONNX Runtime's {cosines.round(2).tolist()}")
assert np.allclose(right, embedder(ids, mask).detach().numpy(), atol=1e-5)
assert max(cosines) < 0.98, "the behaviour has changed"

axis = {"axis": np.int64(1)}
image, states = numbers(1, 2, 5, 6), numbers(2, 3, 4)
cases = (
    ("CumSum without attributes", node("CumSum", 14, axis, inputs="x,axis"), states, False),
    ("CumSum, reverse=0", node("CumSum", 14, axis, inputs="x,axis", reverse=0), states, True),
    ("Softmax of opset 11, axis=1", node("Softmax", 11, {}, axis=1), states, True),
    ("Resize, linear, asymmetric", resize(mode="linear", coordinate_transformation_mode="asymmetric"), image, False),
    ("Resize, linear, align_corners", resize(mode="linear", coordinate_transformation_mode="align_corners"), image, True),
    ("Resize, nearest, asymmetric, ceil", resize(mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="ceil"), image, False),
    ("Resize, linear, half_pixel", resize(mode="linear", coordinate_transformation_mode="half_pixel"), image, True),
    ("PRelu, a slope for each of 3 columns", node("PRelu", 16, {"slope": numbers(3)}, inputs="x,slope"), numbers(1, 3, 3), False),
    ("PRelu, a slope for each of 3 channels", node("PRelu", 16, {"slope": numbers(3, 1)}, inputs="x,slope"), numbers(1, 3, 3), True),
    ("NonZero", node("NonZero", 13, {}), np.maximum(states, 0), False),
)
for name, model, x, agrees in cases:
    found, right = by_onnx2torch(model, {"x": x}), by_onnxruntime(model, {"x": x})
    off = f"off by {np.abs(found - right).max():.2g}" if found.shape == right.shape else f"shape {found.shape} and not {right.shape}"
    print(f"{name}: {off}")
    assert (found.shape == right.shape and np.allclose(found, right, atol=1e-5)) == agrees, "the behaviour has changed"
PYTHON
