#!/usr/bin/env bash
# torch 2.13.0 (torch.utils.flop_counter), torchinfo 1.8.0, thop 0.1.1, torch-pruning 1.6.1: none of these four counters finds the multiplications of a layer of a
# Transformer on a CPU.
# The guess was that they agree up to biases, norms and a factor of 2, as they do for a convolution, and that what they cannot count is named.
#
# Seen (2026-11-29), at 512 tokens of width 64, as shares of the multiplications that there are: FlopCounterMode knows no fused attention of the
# CPU, and counts 20 % of attention, and 0 % of an LSTM or of MultiheadAttention in eval mode; under SDPBackend.MATH it counts the first whole. torchinfo multiplies the weights of a Linear by the rows of
# the batch and not by the tokens: 1 in 512, and the same figure for 32 and for 512 tokens, so that a cut of the length seems to save nothing. thop and
# torch-pruning count modules: 0 % of a weight that is used as x @ w or by F.linear, 20 % of attention, and thop 0 % of MultiheadAttention. An
# LSTM has 66 times its multiplications in torch-pruning. Nothing warns. "Saved 40 % of the FLOPs" is then a share of other numbers than the time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 torchinfo==1.8.0 numpy==2.4.6
"$folder/venv/bin/pip" install -qq --no-deps thop==0.1.1.post2209072238 torch-pruning==1.6.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import contextlib
import io
from collections.abc import Callable
from importlib.metadata import version

import thop
import torch
import torch_pruning
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode
from torchinfo import summary

TOKENS, WIDTH = 512, 64
PRODUCT, ATTENTION = TOKENS * WIDTH * WIDTH, 2 * TOKENS * TOKENS * WIDTH


class Layer(nn.Module):
    def __init__(self, answer: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.answer = answer
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self, x)


def attention(layer: nn.Module, x: Tensor) -> Tensor:
    """Four heads; four products with weights."""
    queries, keys, values = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in layer.first(x).chunk(3, -1))
    return layer.last(scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))


def by_torch(layer: nn.Module, x: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops() / 2


def by_torch_math(layer: nn.Module, x: Tensor) -> float:
    with sdpa_kernel(SDPBackend.MATH):
        return by_torch(layer, x)


COUNTERS = {
    "FlopCounterMode": by_torch,
    "FlopCounterMode, MATH": by_torch_math,
    "torchinfo": lambda layer, x: summary(layer, input_data=x, verbose=0).total_mult_adds,
    "thop": lambda layer, x: thop.profile(layer, (x,), verbose=False)[0],
    "torch-pruning": lambda layer, x: torch_pruning.utils.count_ops_and_params(layer, x)[0],
}
weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
layers = {
    "Conv1d, 3 wide": (nn.Sequential(nn.Conv1d(TOKENS, 8, 3, padding=1)), 3 * 8 * TOKENS * WIDTH, (1, 1, 1, 1, 1)),
    "Linear": (nn.Sequential(nn.Linear(WIDTH, WIDTH)), PRODUCT, (1, 1, 1 / TOKENS, 1, 1)),
    "x @ w": (Layer(lambda self, x: x @ self.w, w=weight), PRODUCT, (1, 1, 0, 0, 0)),
    "F.linear": (Layer(lambda self, x: linear(x, self.w), w=weight), PRODUCT, (1, 1, 0, 0, 0)),
    "attention": (Layer(attention, first=nn.Linear(WIDTH, 3 * WIDTH), last=nn.Linear(WIDTH, WIDTH)), 4 * PRODUCT + ATTENTION, (0.2, 1, 0.2 / TOKENS, 0.2, 0.2)),
    "MultiheadAttention": (
        Layer(lambda self, x: self.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(WIDTH, 4, batch_first=True)),
        4 * PRODUCT + ATTENTION, (0, 0, 0, 0, 1),
    ),
    "LSTM": (Layer(lambda self, x: self.a(x)[0], a=nn.LSTM(WIDTH, WIDTH, batch_first=True)), 8 * PRODUCT, (0, 0, 1, 1, 66)),
}
torch.manual_seed(0)
x = torch.randn(1, TOKENS, WIDTH)
print(f"torch {version('torch')}, torchinfo {version('torchinfo')}, thop {version('thop')}, torch-pruning {version('torch-pruning')}; 1 row of {TOKENS} tokens")
for name, (layer, right, shares) in layers.items():
    layer = layer.eval()
    found = {}
    for counter, count in COUNTERS.items():
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            found[counter] = float(count(layer, x)) / right
    print(f"{name}: " + ", ".join(f"{counter} {share:.4f}" for counter, share in found.items()))
    for share, seen in zip(shares, found.values(), strict=True):
        assert abs(seen - share) < 0.04 * share + 1e-4, "the behaviour has changed"
few = summary(layers["Linear"][0], input_data=x[:, :32], verbose=0).total_mult_adds
many = summary(layers["Linear"][0], input_data=x, verbose=0).total_mult_adds
print(f"torchinfo, Linear: {few} for 32 tokens, {many} for {TOKENS}")
assert few == many, "the behaviour has changed"
PYTHON
