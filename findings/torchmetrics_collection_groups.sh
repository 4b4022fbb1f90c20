#!/usr/bin/env bash
# torchmetrics 1.9.0: in a MetricCollection two metrics with different arguments can become one. The guess was that metrics share a state where
# their class and their arguments say so, and that a second threshold or `ignore_index` makes a state of its own.
#
# Seen (2026-11-28): the states are compared once, after the first batch, by their numbers. Whatever is equal there is merged, and all later
# batches count for the first of the group alone. F1 at a threshold of 0.9 answers with F1 at 0.5 if no score of the first batch lies between
# them; accuracy that ignores class 0 counts class 0 if the first batch has none. Another order of the same batches gives other results.
# Nothing warns. compute_groups=False, or metrics outside of a collection, are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 torchmetrics==1.9.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch
import torchmetrics
from torch import tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy

Batch = tuple[torch.Tensor, torch.Tensor]


def thresholds() -> dict[str, Metric]:
    return {"F1 at half": BinaryF1Score(threshold=0.5), "F1 at nine tenths": BinaryF1Score(threshold=0.9)}


def ignored() -> dict[str, Metric]:
    return {"all": MulticlassAccuracy(4, average="micro"), "without 0": MulticlassAccuracy(4, average="micro", ignore_index=0)}


def results(metrics: dict[str, Metric], batches: list[Batch], **settings: bool) -> dict[str, float]:
    collection = MetricCollection(metrics, **settings)
    for scores, labels in batches:
        collection.update(scores, labels)
    return {name: round(value.item(), 4) for name, value in collection.compute().items()}


scores = [(tensor([0.95, 0.1]), tensor([1, 0])), (tensor([0.6, 0.1, 0.7]), tensor([1, 0, 1]))]
classes = [(tensor([1, 2, 3, 1]), tensor([1, 2, 3, 2])), (tensor([1, 2, 0, 0]), tensor([1, 0, 0, 0]))]
expected = {
    "F1 at half": {"merged": 1.0, "apart": 1.0},
    "F1 at nine tenths": {"merged": 1.0, "apart": 0.5},
    "all": {"merged": 0.75, "apart": 0.75},
    "without 0": {"merged": 0.75, "apart": 0.8},
}
for build, batches in ((thresholds, scores), (ignored, classes)):
    seen = results(build(), batches)
    turned = results(build(), batches[::-1])
    apart = results(build(), batches, compute_groups=False)
    alone = {}
    for name, metric in build().items():
        for one, labels in batches:
            metric.update(one, labels)
        alone[name] = round(metric.compute().item(), 4)
    print(f"torchmetrics {torchmetrics.__version__}: a collection {seen}, with the batches in the other order {turned}, alone {alone}")
    assert apart == alone == turned == {name: expected[name]["apart"] for name in seen}
    assert seen == {name: expected[name]["merged"] for name in seen}, "the behaviour has changed"
PYTHON
