#!/usr/bin/env bash
# hqq 0.2.8.post1, torch 2.13.0: 8 bits of small weights are no finer than 6 or 4 bits, and a group narrower than 0.0001 becomes one number.
# The guess was that a scale for each group makes the error independent of the weights' size, as it is for 2 to 4 bits of weights of ordinary size.
#
# Seen (2026-11-30), normal weights in groups of 64: the inverse of the scale is limited to 20,000, so that no step is smaller than 0.00005. 8 bits
# are off by 0.5 % at a standard deviation of 0.005, by 0.7 % at 0.002, 1.4 % at 0.001 and 14 % at 0.0001, as 4 bits are. At 0.00001 every bit width
# is off by 99 %: groups with a range of at most 0.0001 get the scale 1, and one value for all. Wide layers, layers behind a multiplier, norms folded
# into weights and differences of fine-tuned to base weights have such sizes. Multiply by a power of two first, and the error is that of large
# weights. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6 termcolor==3.3.0 einops==0.8.2 tqdm==4.70.1 accelerate==1.15.0 transformers==5.23.0
"$folder/venv/bin/pip" install -qq --no-compile --no-deps hqq==0.2.8.post1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

torch.manual_seed(0)
normal = torch.randn(128, 256)
print(f"hqq {version('hqq')}, torch {torch.__version__}")


def off(weights, bits):
    """The relative error of the weights that a layer multiplies with."""
    layer = torch.nn.Linear(256, 128, bias=False)
    layer.weight.data = weights.clone()
    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    quantized = HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
    return ((quantized.dequantize() - weights).norm() / weights.norm()).item()


errors = {}
for deviation in (1, 0.005, 0.002, 0.001, 0.0001, 0.00001):
    errors[deviation] = {bits: off(normal * deviation, bits) for bits in (8, 4, 2)}
    print(f"standard deviation {deviation:g}: " + ", ".join(f"{bits} bits {error:.1%}" for bits, error in errors[deviation].items()))
changed = "the behaviour has changed"
assert errors[1][8] < 0.006 and errors[1][4] < 0.1 and errors[0.005][8] < 0.006
assert errors[0.002][8] > 1.2 * errors[1][8] and errors[0.001][8] > 2.4 * errors[1][8], changed
assert errors[0.0001][8] > 0.1 and abs(errors[0.0001][8] - errors[0.0001][4]) < 1e-3 and min(errors[0.00001].values()) > 0.9, changed
scaled = normal * 0.0001 * 2**13
assert off(scaled, 8) < 0.006
PYTHON
