#!/usr/bin/env bash
# ml_dtypes 0.5.4, NumPy 2.4.6: the mean of a bfloat16 array is added up in bfloat16, one element after another. The guess was what NumPy does for
# its own float16: a mean in float32, and sums of pairs.
#
# Seen (2026-11-28): a sum stops growing at 256, since 256 + 1 is 256 in bfloat16. The mean of 1,000 ones is 0.256, the mean size of 4,096 normal
# numbers 0.25 instead of 0.80, their standard deviation 0.70 instead of 1.00. Errors grow with the length; float8 sums of ones stop at 16.
# Nothing warns. norm and `@` are right, and so is dtype=np.float32 in the call. Such arrays come from onnx.numpy_helper, JAX, and the BF16 outputs
# of tritonclient 2.73.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq ml_dtypes==0.5.4 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

bfloat16 = ml_dtypes.bfloat16
print(f"ml_dtypes {ml_dtypes.__version__}, NumPy {np.__version__}")
ones = {kind: float(np.ones(1000, kind).mean()) for kind in (bfloat16, np.float16, ml_dtypes.float8_e4m3fn)}
for kind, mean in ones.items():
    print(f"mean of 1,000 ones in {np.dtype(kind)}: {mean}, sum {np.ones(1000, kind).sum()}")

weights = np.random.default_rng(0).standard_normal(4096).astype(bfloat16)
exact = weights.astype(np.float64)
seen = {"mean size": np.abs(weights).mean(), "standard deviation": weights.std(), "norm": np.linalg.norm(weights), "w @ w": weights @ weights}
right = {"mean size": np.abs(exact).mean(), "standard deviation": exact.std(), "norm": np.linalg.norm(exact), "w @ w": exact @ exact}
errors = {name: abs(float(value) - right[name]) / right[name] for name, value in seen.items()}
for name, value in seen.items():
    print(f"4,096 normal numbers in bfloat16, {name}: {float(value):.4f}, exactly {right[name]:.4f}")
means = {length: float(np.abs(weights[:length]).mean()) / float(np.abs(exact[:length]).mean()) for length in (64, 256, 1024, 4096)}
print(f"mean size divided by the exact one, by length: { {length: round(ratio, 3) for length, ratio in means.items()} }")
assert abs(float(np.abs(weights).mean(dtype=np.float32)) - right["mean size"]) < 1e-4
assert errors["norm"] < 1e-3 and errors["w @ w"] < 1e-3, errors
assert ones[np.float16] == 1.0 and ones[bfloat16] == 0.255859375, "the behaviour has changed"
assert errors["mean size"] > 0.6 and errors["standard deviation"] > 0.25, "the behaviour has changed"
PYTHON
