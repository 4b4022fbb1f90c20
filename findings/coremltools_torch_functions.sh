#!/usr/bin/env bash
# coremltools 9.0 (Core ML), torch 2.13.0: the converter turns 1 / x into 1 / (x + 0.0001), RMSNorm into a norm whose epsilon grows with the largest number,
# and four more functions into formulas that overflow or end early.
# The guess was that a function of torch becomes the same function, to a few digits, or is refused, as fmod and round(decimals=1) are.
#
# Seen (2026-12-01): reciprocal, which 1 / x is in torch too, becomes `inverse` with its default epsilon: 1 / 0.001 is 909, 1 / -0.0001 is infinite.
# A tensor of ones divided by x is right. A traced rms_norm divides by the largest size first and adds eps to the mean of the squares of that: eps is
# multiplied by the square of the largest number. Rows of size 0.001 with eps=1e-6 are off by 38 %, a row of 4096 with one large number by 2 %, and
# a row of zeros (padding) is NaN, in torch 0. A traced cosine_similarity takes eps for the product of both norms: of vectors of size 0.00001 it is 0.0002
# and not 0.04. log_softmax is the logarithm of softmax and ends at -103; logcumsumexp is infinite above 88, a traced softplus with beta=2 of an image
# from 44 on. An exported program (torch.export) has rms_norm, cosine_similarity and softplus right, and the others as wrong. layer_norm, logsumexp and
# softplus without beta are right. Core ML itself runs on a Mac alone: the numbers are those that the converter stores for functions of parameters, and the same
# operators stand in the graph where the input is not known. Nothing warns of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 coremltools==9.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { tail -30 "$folder/log"; exit 1; }
import logging
from collections.abc import Callable
from importlib.metadata import version

import coremltools as ct
import numpy as np
import torch
from torch.nn import functional

changed = "the behaviour has changed"
logging.disable(logging.WARNING)
torch.manual_seed(0)


class Model(torch.nn.Module):
    """Adds a function of a parameter, which the converter computes, to the input; or is the function of its input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.values = None if values is None else torch.nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.values is None else x + self.function(self.values)


def converted(model, x, exported):
    settings = dict(convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    settings["compute_precision"] = ct.precision.FLOAT32
    if exported:
        return ct.convert(torch.export.export(model.eval(), (x,)).run_decompositions(), **settings)
    return ct.convert(torch.jit.trace(model.eval(), x), inputs=[ct.TensorType(name="x", shape=tuple(x.shape))], **settings)


def operators(function, values, exported):
    """The operators of the converted model, and the constants `epsilon` that they are given."""
    [block] = converted(Model(function), values, exported).get_spec().mlProgram.functions["main"].block_specializations.values()
    constants = {op.outputs[0].name: op.attributes["val"].immediateValue.tensor for op in block.operations if op.type == "const"}
    found = [op for op in block.operations if op.type != "const"]
    return [op.type for op in found], [
        constants[op.inputs["epsilon"].arguments[0].name].floats.values[0] for op in found if "epsilon" in op.inputs
    ]


def computed(function, values, exported):
    """What the converter makes of the function of a parameter."""
    right = function(values)
    model = converted(Model(function, values), torch.zeros_like(right), exported)
    stored = ct.optimize.coreml.get_weights_metadata(model, weight_threshold=1).values()
    [found] = [entry.val for entry in stored if entry.val.shape == right.shape]
    return found, right.numpy()


print(*(f"{name} {version(name)}" for name in ("coremltools", "torch", "numpy")))
small = torch.tensor([[1e-4, 1e-3, 1e-2, 1.0, -1e-3, -1e-4]])
rows = torch.randn(4, 64)
zero = torch.cat([rows[:1], torch.zeros(1, 64)])
outlier = torch.randn(2, 4096)
outlier[0, 0] = 3000
for name, function, values, wrong in (
    ("1 / x", lambda x: 1 / x, small, (True, True)),
    ("ones / x", lambda x: torch.ones_like(x) / x, small, (False, False)),
    ("rms_norm, eps=1e-6", lambda x: functional.rms_norm(x, (64,), eps=1e-6), rows, (False, False)),
    ("rms_norm of 0.001 x", lambda x: functional.rms_norm(x, (64,), eps=1e-6), 0.001 * rows, (True, False)),
    ("rms_norm with a row of zeros", lambda x: functional.rms_norm(x, (64,), eps=1e-6), zero, (True, False)),
    ("rms_norm with an outlier, eps=1e-5", lambda x: functional.rms_norm(x, (4096,), eps=1e-5), outlier, (True, False)),
    ("layer_norm of 0.001 x", lambda x: functional.layer_norm(x, (64,), eps=1e-6), 0.001 * rows, (False, False)),
    ("cosine_similarity", lambda x: functional.cosine_similarity(x[:2], x[2:]), rows, (False, False)),
    ("cosine_similarity of 1e-6 x", lambda x: functional.cosine_similarity(x[:2], x[2:]), 1e-6 * rows, (True, False)),
    ("log_softmax", lambda x: functional.log_softmax(x, -1), torch.tensor([[0.0, -50, -150, -300]]), (True, True)),
    ("x - logsumexp", lambda x: x - torch.logsumexp(x, -1, keepdim=True), torch.tensor([[0.0, -50, -150, -300]]), (False, False)),
    ("logcumsumexp", lambda x: torch.logcumsumexp(x, -1), torch.tensor([[0.0, 50, 100]]), (True, True)),
    ("softplus, beta=2, of an image", lambda x: functional.softplus(x, beta=2.0), torch.tensor([[[[0.0, 40, 60]]]]), (True, False)),
    ("softplus of an image", functional.softplus, torch.tensor([[[[0.0, 40, 60, 100]]]]), (False, False)),
):
    for exported in (False, True):
        found, right = computed(function, values, exported)
        error = float(np.abs(found - right).max() / np.abs(right).max())
        shown = (slice(0, 1), slice(0, 3)) if right.ndim == 2 and right.shape[1] > 9 else ...
        print(f"{name}, {'exported' if exported else 'traced'}: {found[shown].ravel().tolist()}, in torch {right[shown].ravel().tolist()}")
        assert np.isfinite(right).all() and (not error < 1e-3) == wrong[exported], changed
found, _ = computed(lambda x: functional.rms_norm(x, (64,), eps=1e-6), zero, False)
print(f"rms_norm, the row of zeros: {found[1, :3].tolist()}")
assert np.isfinite(found[0]).all() and np.isnan(found[1]).all(), changed
for exported in (False, True):
    kinds, epsilons = operators(lambda x: 1 / x, small, exported)
    print(f"1 / x of an input, {'exported' if exported else 'traced'}: {kinds} with epsilon {epsilons}")
    assert kinds[0] == "inverse" and np.allclose(epsilons, 1e-4), changed
kinds, _ = operators(lambda x: functional.rms_norm(x, (64,), eps=1e-6), rows, False)
print(f"rms_norm of an input, traced: {kinds}")
assert kinds[:3] == ["abs", "reduce_max", "real_div"], changed
PYTHON
