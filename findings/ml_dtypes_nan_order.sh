#!/usr/bin/env bash
# ml_dtypes 0.6.0, NumPy 2.4.6: one NaN in a bfloat16 or float8 array, and NumPy's sort, argsort, median and percentile are wrong for the other
# numbers. Besides, a float64 is rounded twice on its way to bfloat16.
# The guess was what NumPy does for its own float16: NaN comes last, the rest is in order, and a median or percentile of an array with a NaN is NaN.
#
# Seen (2026-11-30): NaN stands somewhere in the middle, and the numbers before and behind it are sorted each by themselves. Of 1,000
# scores, one of them NaN, the ten largest by argsort(-scores) hold five of the right ones in bfloat16. A percentile for a clipping range,
# and a median, come out as numbers of an array that has a NaN, so that a check of the result for NaN finds nothing. max and argmax show
# the NaN. float16 and float32 are right, and so is .astype(np.float32) first. 1 + 2^-8 + 2^-40, above the middle of two bfloat16 numbers,
# becomes 1 and not 1.0078: the float64 is rounded to float32 first. Such arrays come from safetensors, onnx, JAX and tritonclient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq ml_dtypes==0.6.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import ml_dtypes
import numpy as np

CHANGED = "the behaviour has changed"
print(f"ml_dtypes {ml_dtypes.__version__}, NumPy {np.__version__}")
normal = np.random.default_rng(0).normal(size=1000)
for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    own = kind in (np.float32, np.float16)
    scores = normal.astype(kind)
    scores[500] = np.nan
    wide = scores.astype(np.float32)
    place = int(np.flatnonzero(np.isnan(np.sort(scores).astype(np.float32)))[0])
    largest = np.sort(wide[np.argsort(-scores)[:10]])
    right = np.sort(wide[np.argsort(-wide)[:10]])
    common = sum(bool(score in largest) for score in right)
    median, percentile = float(np.median(scores)), float(np.percentile(scores, 99))
    print(f"{np.dtype(kind)}: NaN at place {place} of 0 to 999, {common} of the 10 largest scores, median {median:.3f}, "
          f"99th percentile {percentile:.3f}, max {float(scores.max())}, argmax {scores.argmax()}")
    assert np.isnan(np.median(wide)) and np.isnan(np.percentile(wide, 99)) and np.isnan(float(scores.max())) and scores.argmax() == 500
    assert (place == 999) == own and np.isnan([median, percentile]).all() == own, CHANGED
    assert common == 10 if own else (common < 8 or kind != ml_dtypes.bfloat16), CHANGED

for value in (1 + 2**-8 + 2**-40, 1 + 2**-8 + 2**-20):
    print(f"{value:.13f} as bfloat16: {float(np.float64(value).astype(ml_dtypes.bfloat16))}, below lies 1, above 1.0078125, the middle is {1 + 2**-8}")
assert float(np.float64(1 + 2**-8 + 2**-20).astype(ml_dtypes.bfloat16)) == 1.0078125
assert float(np.float64(1 + 2**-8 + 2**-40).astype(ml_dtypes.bfloat16)) == 1, CHANGED
PYTHON
