#!/usr/bin/env bash
# neural-compressor-pt 3.10 (Intel Neural Compressor): dtype="fp4_e2m1" is not E2M1. The guess was the eight sizes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the
# OCP format, which NVFP4, MXFP4, ml_dtypes and ONNX mean by that name.
#
# Seen (2026-11-28): in place of 0.5 it has 0.0625, as the FP4 of bitsandbytes has one, so that a weight of half a step becomes a sixteenth of one.
# Normal weights in groups of 32 are off by 11.3 %, with E2M1 and the same scales by 10.2 %. Whoever reads these codes as E2M1 multiplies with
# other weights than the model that was measured. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 neural-compressor-pt==3.10 ml-dtypes==0.5.4 numpy==2.4.6
OMP_NUM_THREADS=1 LOGLEVEL=ERROR "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import ml_dtypes
import numpy as np
import torch
from neural_compressor.torch.quantization import RTNConfig, convert, prepare

torch.manual_seed(0)


def stored(weights, dtype):
    """The weights that the converted layer multiplies with."""
    layer = torch.nn.Linear(*reversed(weights.shape), bias=False)
    layer.weight.data.copy_(weights)
    model = convert(prepare(torch.nn.Sequential(layer), RTNConfig(dtype=dtype, group_size=32, use_layer_wise=False)))
    return model(torch.eye(weights.shape[1])).T


print(f"neural-compressor-pt {version('neural-compressor-pt')}, ml_dtypes {version('ml_dtypes')}")
e2m1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
fine = torch.linspace(0, 6, 32 * 32).reshape(32, 32)
fine[:, 0] = 6
sizes = sorted({round(value, 4) for value in stored(fine, "fp4_e2m1").flatten().tolist()})
print(f"sizes of fp4_e2m1 {sizes}, of E2M1 {e2m1.tolist()}")
assert e2m1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
assert sizes == [0, 0.0625, 1, 1.5, 2, 3, 4, 6], "the behaviour has changed"

weights = torch.randn(256, 256)
seen = stored(weights, "fp4_e2m1")
scales = weights.reshape(-1, 32).abs().amax(1, keepdim=True) / 6
right = torch.from_numpy((weights.reshape(-1, 32) / scales).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)) * scales
errors = [((made.reshape(256, 256) - weights).norm() / weights.norm()).item() for made in (seen, right)]
print(f"normal weights: off by {errors[0]:.1%}, with E2M1 and the same scales by {errors[1]:.1%}")
assert errors[0] > 1.05 * errors[1], "the behaviour has changed"
PYTHON
