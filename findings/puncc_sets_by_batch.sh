#!/usr/bin/env bash
# puncc 0.9.3: a prediction set of APS or RAPS holds at most as many classes as there are rows in the call. The guess was that the sets of 1,000 rows
# are the same whether they are asked for together or one by one, as a server asks.
#
# Seen (2026-11-28): the size of a set is limited by the number of rows where the number of classes was meant. Of ten classes, sets for a promise of
# 90 % hold the true class in 95 % of all cases if 1,000 rows are asked for in one call, in 85 % in calls of 4 rows, and in 43 % row by row, since
# no set then has more than one class. LAC is right in all of them. Nothing warns, and an evaluation on a whole test set shows nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq puncc==0.9.3 numpy==1.26.4
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from deel.puncc.api.prediction import BasePredictor
from deel.puncc.classification import APS, LAC, RAPS
from deel.puncc.metrics import classification_mean_coverage, classification_mean_size

generator = np.random.default_rng(0)


class Given(BasePredictor):
    """A classifier whose inputs are its probabilities."""

    def predict(self, X, **settings):
        return X


def draw(rows):
    """Probabilities of ten classes, and labels drawn with them."""
    logits = generator.normal(0, 1.5, (rows, 10))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return probabilities, np.array([generator.choice(10, p=row) for row in probabilities])


def coverage(method, batch, **settings):
    """Share of sets with the true class, and their mean size."""
    np.random.seed(0)
    predictor = method(Given(None, is_trained=True), train=False, **settings)
    predictor.fit(X_calib=CALIBRATION[0], y_calib=CALIBRATION[1])
    sets = []
    for first in range(0, 1000, batch):
        sets += predictor.predict(TEST[0][first : first + batch], alpha=0.1)[1]
    return classification_mean_coverage(TEST[1], sets), float(classification_mean_size(sets))


CALIBRATION, TEST = draw(1000), draw(1000)
print(f"puncc {version('puncc')}")
for method, settings in ((APS, {"rand": False}), (RAPS, {"lambd": 0.01, "k_reg": 3, "rand": False}), (LAC, {})):
    for batch in (1000, 4, 2, 1):
        seen, size = coverage(method, batch, **settings)
        print(f"{method.__name__}, calls of {batch} rows: {seen:.1%} of the sets hold the true class, {size:.2f} classes a set")
        assert (seen < 0.85) == (method is not LAC and batch < 1000), "the behaviour has changed"
PYTHON
