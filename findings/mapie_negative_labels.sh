#!/usr/bin/env bash
# MAPIE 1.6.0, scikit-learn 1.9.1: the coverage of prediction sets is wrong for classes that are numbered -1, 0, 1 (sentiment) or -1, 1. The guess
# was that classification_coverage_score counts how often the true class is in its set, since classifier and sets know these classes.
#
# Seen (2026-11-28): the label itself is taken as the number of a column, and a negative one counts from the end. For -1, 0, 1 every label is looked
# up in the column of another class, and for -1, 1 both in the column of class 1. Sets that hold the true class in 91 % of all cases are reported
# with 26 % (-1, 0, 1) and 45 % (-1, 1). Labels 1, 2, 3 raise an IndexError. Nothing warns, and the sets themselves are right. With the place of
# each label in classes_ (numpy.searchsorted) the score is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq mapie==1.6.0 scikit-learn==1.9.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from mapie.classification import SplitConformalClassifier
from mapie.metrics.classification import classification_coverage_score
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression


def coverages(names):
    """The score of MAPIE, and the share of sets that hold the true class."""
    settings = {"n_classes": len(names), "n_features": 8, "n_informative": 6, "class_sep": 1.5, "random_state": 0}
    features, places = make_classification(n_samples=6000, **settings)
    labels = np.array(names)[places]
    classifier = LogisticRegression().fit(features[:2000], labels[:2000])
    conformal = SplitConformalClassifier(classifier, confidence_level=0.9, prefit=True)
    conformal.conformalize(features[2000:4000], labels[2000:4000])
    _, sets = conformal.predict_set(features[4000:])
    truth = labels[4000:]
    columns = np.searchsorted(classifier.classes_, truth)
    right = sets[np.arange(len(truth)), columns, 0].mean()
    assert classification_coverage_score(columns, sets)[0] == right
    return float(classification_coverage_score(truth, sets)[0]), float(right)


print(f"mapie {version('mapie')}")
for names, wrong in (([0, 1, 2], False), ([0, 1], False), ([-1, 0, 1], True), ([-1, 1], True)):
    seen, right = coverages(names)
    print(f"classes {names}: coverage by MAPIE {seen:.1%}, true classes in their sets {right:.1%}")
    assert abs(right - 0.9) < 0.03
    assert (abs(seen - right) > 0.3) == wrong, "the behaviour has changed"
try:
    coverages([1, 2, 3])
except IndexError as refusal:
    print(f"classes [1, 2, 3]: {refusal}")
else:
    raise AssertionError("the behaviour has changed")
PYTHON
