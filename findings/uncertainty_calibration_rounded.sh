#!/usr/bin/env bash
# uncertainty-calibration 0.1.4 (Verified Uncertainty Calibration): probabilities that are rounded to two digits, or to 8 bits, have a calibration error several times
# as large, and an interval for 90 % is one for 99.9 %.
# The guess was that rounding by at most 0.005 changes an error of calibration by at most 0.005, and that alpha=0.1 leaves out a tenth.
#
# Seen (2026-11-29): where less than a quarter of the numbers are distinct, the model is taken for one that was binned, and each distinct number gets a bin
# of its own. 2,000 probabilities that are right have an error of 0.00 (p=2) and 0.03 (p=1, debias=False); the same in the 256 steps of an int8
# softmax 0.01 and 0.11, with two digits, as logs have them, 0.03 and 0.07. The intervals, which are never debiased, go from (0.00, 0.04) to
# (0.05, 0.08): a quantized model looks significantly worse calibrated than its float one. And alpha is a
# percentage below: the default alpha=0.1 takes the 0.05th and the 99.95th percentile of 100 draws, the smallest and the largest.
# Nothing warns. get_ece, and lower_bound_scaling_ce, have 15 bins whatever comes in: 0.03 for all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq uncertainty-calibration==0.1.4 numpy==2.4.6 scikit-learn==1.9.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from calibration import get_calibration_error, get_calibration_error_uncertainties, get_ece, lower_bound_scaling_ce

ROWS = 2000
generator = np.random.default_rng(0)
probabilities = generator.random(ROWS)
labels = (generator.random(ROWS) < probabilities).astype(int)
print(f"uncertainty-calibration {version('uncertainty-calibration')}, {ROWS} probabilities that are right")
seen = {}
for name, scores in (("float", probabilities), ("8 bits", np.round(probabilities * 255) / 255), ("two digits", probabilities.round(2))):
    np.random.seed(0)
    low, _, high = get_calibration_error_uncertainties(scores, labels, p=1)
    seen[name] = {
        "debiased, p=2": get_calibration_error(scores, labels), "plain, p=1": get_calibration_error(scores, labels, p=1, debias=False),
        "plain, p=2": get_calibration_error(scores, labels, debias=False), "low": low, "high": high, "ECE": get_ece(scores, labels),
        "15 bins": lower_bound_scaling_ce(scores, labels, p=1, debias=False),
    }
    print(f"{name}, moved by at most {np.abs(scores - probabilities).max():.4f}: " + ", ".join(f"{key} {value:.3f}" for key, value in seen[name].items()))
right = seen.pop("float")
for name, found in seen.items():
    assert found["plain, p=1"] > 2 * right["plain, p=1"] and found["plain, p=2"] > 2 * right["plain, p=2"], "the behaviour has changed"
    assert found["debiased, p=2"] > right["debiased, p=2"] + 0.01, "the behaviour has changed"
    assert abs(found["ECE"] - right["ECE"]) < 0.003 and abs(found["15 bins"] - right["15 bins"]) < 0.003
assert seen["8 bits"]["low"] > right["high"], "the behaviour has changed"

widths = {}
for alpha in (0.1, 10.0):
    np.random.seed(0)
    low, _, high = get_calibration_error_uncertainties(probabilities, labels, p=1, alpha=alpha)
    widths[alpha] = high - low
print(f"width of the interval: {widths[0.1]:.4f} for alpha=0.1, {widths[10.0]:.4f} for alpha=10")
assert widths[0.1] > 1.25 * widths[10.0], "the behaviour has changed"
PYTHON
