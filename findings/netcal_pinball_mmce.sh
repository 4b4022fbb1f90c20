#!/usr/bin/env bash
# netcal 1.4.0: its pinball loss is not the one of its documentation, and MMCE finds calibrated binary probabilities far off.
# The guesses were the formula that the docstring gives, as in scikit-learn: the loss of the quantile for 90 %, which is dear to miss from below; and
# that a binary classifier has the same MMCE whether its probabilities are given as one column or as two.
#
# Seen (2026-11-30): PinballLoss takes the nearer end of the central interval that holds the share q, and weighs errors with 1 - q inside of it and
# with q outside of it, on both sides. A prediction that is too high by 1 has the same loss at q = 0.9 as one that is too low by 1, where the loss
# of the formula is 1.4 times as large for the second. At 0.5 it is not half of the mean absolute error. MMCE of one column takes the probability
# of class 1 for the confidence, also where class 0 is predicted: probability 0.1 with class 0, which is right, is an error of 0.9. Calibrated
# probabilities have an MMCE of 0.21, with two columns 0.009, and ECE, which takes the same column, 0.013. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 netcal==1.4.0 numpy==2.4.6 scikit-learn==1.9.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from netcal.metrics import ECE, MMCE, PinballLoss
from scipy.stats import norm
from sklearn.metrics import mean_pinball_loss

ROWS = 4000
random = np.random.default_rng(0)
changed = "the behaviour has changed"
print(f"netcal {version('netcal')}, scikit-learn {version('scikit-learn')}")

mean, deviation = random.normal(size=ROWS), 0.5 + random.random(ROWS)
truth = mean + deviation * random.normal(size=ROWS)


def losses(shift, level):
    """The pinball loss by netcal and by its formula, of predictions that are shifted."""
    quantile = norm.ppf(level, mean + shift, deviation)
    theirs = PinballLoss().measure((mean + shift, deviation), truth, np.array([level]))
    return theirs, mean_pinball_loss(truth, quantile, alpha=level)


low, high, median = losses(-1, 0.9), losses(1, 0.9), losses(0, 0.5)
print(f"too low by 1, q = 0.9: {low[0]:.3f}, by the formula {low[1]:.3f}; too high by 1: {high[0]:.3f}, by the formula {high[1]:.3f}")
print(f"q = 0.5: {median[0]:.3f}, half of the mean absolute error {np.abs(truth - mean).mean() / 2:.3f}")
assert low[1] > 1.3 * high[1] and np.isclose(median[1], np.abs(truth - mean).mean() / 2)
assert 0.95 < low[0] / high[0] < 1.05 and median[0] < 0.7 * median[1], changed

probability = random.random(ROWS)
labels = (random.random(ROWS) < probability).astype(int)
columns = np.stack([1 - probability, probability], 1)
one, two, error = MMCE().measure(probability, labels), MMCE().measure(columns, labels), ECE(10).measure(probability, labels)
print(f"calibrated probabilities: MMCE of one column {one:.3f}, of two columns {two:.3f}; ECE {error:.3f}")
assert two < 0.02 and error < 0.04
assert one > 0.15, changed
PYTHON
