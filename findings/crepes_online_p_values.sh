#!/usr/bin/env bash
# crepes 0.9.1: without smoothing, online p-values of the true labels are those of the calibration examples. The guess was that
# predict_p_online(all_classes=False) picks the true labels' column out of what it gives for all classes.
#
# Seen (2026-11-28): with smoothing=False and a calibration set to start from, row q is computed from the score of calibration example q in place of
# test example q. A classifier that is right in every case then has a mean p-value of 0.35 where it is 1, and one that is wrong in every case has
# 0.66 where it is 0.31: the wrong one looks like the one that conforms. With all_classes=True, or smoothing, both are right. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq crepes==0.9.1 scikit-learn==1.9.1 numpy==2.4.6 pandas==3.1.1 scipy==1.17.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from crepes import ConformalClassifier

generator = np.random.default_rng(0)
calibration = ConformalClassifier().fit(generator.uniform(0, 1, 200))
classes, rows = np.arange(3), 200
labels = generator.integers(0, 3, rows)


def p_values(scores, smoothing):
    """p-values of the true labels: asked for alone, and taken from those of all classes."""
    settings = {"classes": classes, "y": labels, "smoothing": smoothing, "seed": 0}
    alone = calibration.predict_p_online(scores, all_classes=False, **settings)
    taken = calibration.predict_p_online(scores, all_classes=True, **settings)[np.arange(rows), labels]
    return alone, taken


print(f"crepes {version('crepes')}")
for name, score, expected in (("right", -1.0, 0.35), ("wrong", 2.0, 0.66)):
    scores = np.full((rows, 3), 0.5)
    scores[np.arange(rows), labels] = score
    for smoothing in (False, True):
        alone, taken = p_values(scores, smoothing)
        print(f"always {name}, smoothing {smoothing}: mean p-value of the true label {alone.mean():.2f}, out of all classes {taken.mean():.2f}")
        if smoothing:
            assert abs(alone.mean() - taken.mean()) < 0.05
        else:
            assert abs(alone.mean() - expected) < 0.1 and abs(alone.mean() - taken.mean()) > 0.3, "the behaviour has changed"
PYTHON
