#!/usr/bin/env bash
# optimum-quanto 0.2.7, torchao 0.18.0, torch 2.13.0: one pruned neuron makes every answer of a float8 model NaN.
# The guess was that 0 is stored as 0: pruning before quantization is an ordinary order, and int8 of both libraries has it right.
#
# Seen (2026-11-30): the scale of a row is its largest size / 448, 0 for a row of zeros, and 0 / 0 is NaN. torch.nn.utils.prune.ln_structured sets
# whole rows to zero and leaves their biases alone. In float8 these neurons are NaN, ReLU keeps NaN, and the next layer spreads it to all answers.
# quanto's qfloat8_e4m3fn and qfloat8_e5m2 and torchao's Float8WeightOnlyConfig do so in float32 and bfloat16, and quantizing warns of nothing. The
# same weights with 1e-6 in the place of each 0 are right. Layers that start as zeros are affected too: the last one of a residual branch, the
# convolutions of ControlNet, B of LoRA. (torchao's zero blocks are issue 4713 of pytorch/ao, open since August.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 optimum-quanto==0.2.7 torchao==0.18.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import torch
import torchao.quantization as torchao
from optimum import quanto
from torch.nn.utils import prune

print(f"optimum-quanto {version('optimum-quanto')}, torchao {version('torchao')}, torch {torch.__version__}")
inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def network(dtype=torch.float32, tiny=0.0):
    """Two layers, an eighth of the neurons between them pruned."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    prune.ln_structured(model[0], "weight", amount=4, n=2, dim=0)
    prune.remove(model[0], "weight")
    with torch.no_grad():
        model[0].weight[model[0].weight == 0] = tiny
    return model.to(dtype).eval()


def by_quanto(kind):
    def quantized(model):
        quanto.quantize(model, weights=kind)
        quanto.freeze(model)
        return model

    return quantized


def by_torchao(config):
    def quantized(model):
        torchao.quantize_(model, config)
        return model

    return quantized


cases = {
    "quanto qint8": (by_quanto(quanto.qint8), False),
    "quanto qfloat8_e4m3fn": (by_quanto(quanto.qfloat8_e4m3fn), True),
    "quanto qfloat8_e5m2": (by_quanto(quanto.qfloat8_e5m2), True),
    "torchao int8": (by_torchao(torchao.Int8WeightOnlyConfig()), False),
    "torchao float8": (by_torchao(torchao.Float8WeightOnlyConfig()), True),
}
with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        for name, (quantized, lost) in cases.items():
            shares = []
            for tiny in (0.0, 1e-6):
                answers, right = quantized(network(dtype, tiny))(inputs.to(dtype)).float(), network()(inputs)
                shares.append(answers.isnan().float().mean().item())
            print(f"{name}, {dtype}: {shares[0]:.0%} of the answers are NaN, {shares[1]:.0%} with 1e-6 in place of 0")
            assert shares == [float(lost), 0.0], "the behaviour has changed"
            assert ((answers - right).norm() / right.norm()).item() < 0.1
PYTHON
