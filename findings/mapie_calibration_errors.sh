#!/usr/bin/env bash
# MAPIE 1.6.0: two of its calibration errors measure something else than their names say. The guesses were that the order of the examples
# does not change an expected calibration error, and that top_label_ece weighs errors by the number of predictions, as the paper that it
# cites does.
#
# Seen (2026-11-28): split_strategy="array split" cuts the scores in the order in which they come, and makes the largest score of each piece the end
# of a bin. Of examples in random order nearly all fall into the first bin. Confidences between 0.5 and 1 of a model that is right in 75 % of all
# cases whatever it says have an error of 0.125 sorted and 0.007 shuffled. top_label_ece takes the plain mean over the predicted classes: 10
# predictions of a rare class decide as much as 1,000 of another, and an error of 0.008 is reported as 0.4. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq mapie==1.6.0 scikit-learn==1.9.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from mapie.metrics.calibration import expected_calibration_error, top_label_ece

print(f"mapie {version('mapie')}")
scores = np.linspace(0.5, 1, 4000)
correct = (np.arange(4000) % 4 != 0).astype(int)
shuffled = np.random.default_rng(0).permutation(4000)
errors = {}
for strategy in ("uniform", "quantile", "array split"):
    for name, order in (("sorted", np.arange(4000)), ("shuffled", shuffled)):
        error = expected_calibration_error(correct[order], scores[order], num_bins=20, split_strategy=strategy)
        errors[strategy, name] = error
        print(f"expected_calibration_error, {strategy}, {name}: {error:.3f}")
        assert (abs(error - 0.125) < 0.005) == ((strategy, name) != ("array split", "shuffled")), "the behaviour has changed"

# Class 0 is predicted 1,000 times with 0.9 and right 900 times, class 1 10 times with 0.9 and right once.
predicted = np.repeat([0, 1], [1000, 10])
truth = np.concatenate([np.repeat([0, 1], [900, 100]), np.repeat([1, 0], [1, 9])])
confidences = np.full(1010, 0.9)
weighted = 0.0
for label in (0, 1):
    chosen = predicted == label
    weighted += chosen.mean() * abs((truth[chosen] == label).mean() - 0.9)
for strategy in ("uniform", "quantile"):
    seen = top_label_ece(truth, confidences, y_score_arg=predicted, num_bins=10, split_strategy=strategy)
    print(f"top_label_ece, {strategy}: {seen:.3f}; weighted by predictions: {weighted:.3f}")
    assert abs(seen - 0.4) < 1e-6 and weighted < 0.01, "the behaviour has changed"
PYTHON
