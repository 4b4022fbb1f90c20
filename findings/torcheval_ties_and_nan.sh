#!/usr/bin/env bash
# torcheval 0.0.7, torch 2.13.0: the hit rate, the reciprocal rank and the top-k accuracy of a model that answers NaN are 1, as are those of a model
# that gives every class the same score. The guess was chance, 1 in 100 for the first of 100 classes, since such a model knows nothing.
#
# Seen (2026-11-29): the rank of the right class is the number of classes with a larger score. Equal scores are not larger, and NaN is larger than
# nothing, so that both are rank 0. Logits that are rounded to whole numbers, as those of an int8 head may be, have a hit rate at 1 of 0.34
# where the floats have 0.18: rounding seems to double the accuracy, which falls to 0.15. Nothing warns. multiclass_accuracy with k=1 takes argmax and
# is right, with k=2 it is as wrong. scikit-learn's top_k_accuracy_score refuses NaN and lets equal scores come in the order of the classes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 torcheval==0.0.7 numpy==2.4.6 scikit-learn==1.9.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from sklearn.metrics import top_k_accuracy_score
from torcheval.metrics.functional import hit_rate, multiclass_accuracy, reciprocal_rank

torch.manual_seed(0)
ROWS, CLASSES = 5000, 100
labels = torch.arange(ROWS) % CLASSES
logits = torch.randn(ROWS, CLASSES)
logits[torch.arange(ROWS), labels] += 1.5
models = {
    "float logits": logits,
    "the same, rounded to whole numbers": logits.round(),
    "all scores equal": torch.zeros(ROWS, CLASSES),
    "all scores NaN": torch.full((ROWS, CLASSES), torch.nan),
}
print(f"torcheval {version('torcheval')}")
seen = {}
for name, scores in models.items():
    found = {
        "hit rate at 1": hit_rate(scores, labels, k=1).mean().item(),
        "reciprocal rank": reciprocal_rank(scores, labels).mean().item(),
        "accuracy, k=1": multiclass_accuracy(scores, labels).item(),
        "accuracy, k=2": multiclass_accuracy(scores, labels, k=2, num_classes=CLASSES).item(),
    }
    if not scores.isnan().any():
        found["scikit-learn, k=1"] = float(top_k_accuracy_score(labels, scores, k=1))
        found["scikit-learn, k=2"] = float(top_k_accuracy_score(labels, scores, k=2))
    seen[name] = found
    print(f"{name}: " + ", ".join(f"{metric} {value:.3f}" for metric, value in found.items()))
right = seen["float logits"]
assert abs(right["hit rate at 1"] - right["accuracy, k=1"]) < 1e-6 and abs(right["accuracy, k=2"] - right["scikit-learn, k=2"]) < 1e-6
coarse = seen["the same, rounded to whole numbers"]
assert coarse["hit rate at 1"] > 1.5 * coarse["accuracy, k=1"] and coarse["accuracy, k=2"] > coarse["scikit-learn, k=2"] + 0.1, "the behaviour has changed"
for name in ("all scores equal", "all scores NaN"):
    assert seen[name]["hit rate at 1"] == seen[name]["reciprocal rank"] == seen[name]["accuracy, k=2"] == 1, "the behaviour has changed"
    assert abs(seen[name]["accuracy, k=1"] - 0.01) < 1e-6
try:
    top_k_accuracy_score(labels, models["all scores NaN"])
except ValueError as refusal:
    print(f"scikit-learn, all scores NaN: {str(refusal).splitlines()[0]}")
else:
    raise AssertionError("the behaviour of scikit-learn has changed")
PYTHON
