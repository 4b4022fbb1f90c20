#!/usr/bin/env bash
# torchmetrics 1.9.0: AUROC, average precision and calibration error of logits depend on the batch size, and AUROC of distances is lost. The guess
# was that a metric of ranks sees the order of the scores and nothing else.
#
# Seen (2026-11-28): each batch is looked at on its own. If one of its scores lies outside of 0 to 1, all get a sigmoid, else none. In batches of one
# row a logit of 0.9 stays 0.9 and a logit of 2 becomes 0.88, so that their order turns. The same 2,000 logits have an AUROC of 0.756 in batches of
# 256 and of 0.716 row by row, where scikit-learn has 0.756. And the sigmoid of every float32 above 17 is 1: energies and Mahalanobis distances,
# 100 to 120 inside and 200 to 220 outside of a distribution, are all equal, with an AUROC of 0.5 where scikit-learn has 1. The documentation
# names the sigmoid, not the rest. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 torchmetrics==1.9.0 scikit-learn==1.9.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import torchmetrics
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryCalibrationError

torch.manual_seed(0)


def results(scores, labels, batch):
    metrics = {"AUROC": BinaryAUROC(), "average precision": BinaryAveragePrecision(), "calibration error": BinaryCalibrationError()}
    for first in range(0, len(scores), batch):
        for metric in metrics.values():
            metric.update(scores[first : first + batch], labels[first : first + batch])
    return {name: round(metric.compute().item(), 3) for name, metric in metrics.items()}


print(f"torchmetrics {torchmetrics.__version__}")
logits = torch.randn(2000) + 0.5
labels = (torch.rand(2000) < logits.sigmoid()).long()
right = {"AUROC": round(roc_auc_score(labels, logits), 3), "average precision": round(average_precision_score(labels, logits), 3)}
print(f"logits, scikit-learn: {right}")
for batch, same in ((256, True), (16, True), (1, False)):
    seen = results(logits, labels, batch)
    print(f"logits in batches of {batch}: {seen}")
    assert (abs(seen["AUROC"] - right["AUROC"]) < 0.005) == same, "the behaviour has changed"

distances = torch.cat([torch.rand(500) * 20 + 100, torch.rand(500) * 20 + 200])
outside = torch.arange(1000) // 500
seen, right = results(distances, outside, 100)["AUROC"], roc_auc_score(outside, distances)
print(f"distances of 100 to 120 inside and 200 to 220 outside: AUROC {seen}, scikit-learn {right}")
assert seen == 0.5 and right == 1, "the behaviour has changed"
PYTHON
