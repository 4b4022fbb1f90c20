#!/usr/bin/env bash
# datasets 5.2.0: class_encode_column gives integer classes other numbers. The guess was that a column of 0 to 11 stays what it is, since the
# classes have numbers already; and a stratified split makes users call it, as it takes ClassLabel columns alone.
#
# Seen (2026-11-27): the values are turned into texts and sorted as texts, so "10" and "11" come before "2". Class 2 becomes 4, class 10
# becomes 2. Nothing warns. A classifier whose twelve outputs answer the old numbers perfectly has an accuracy of 2 in 12 on the new ones.
# Up to ten classes from 0 nothing changes; {-1, 0, 1} become {0, 1, 2}. cast_column with ClassLabel(num_classes=12) keeps the numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq datasets==5.2.0 scikit-learn==1.9.1
HF_HOME="$folder/cache" HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$folder/venv/bin/python" - <<'PYTHON'
import datasets
from datasets import ClassLabel, Dataset

datasets.disable_progress_bars()


def encoded(labels: list[int]) -> list[int]:
    return Dataset.from_dict({"label": labels}).class_encode_column("label")["label"][:]


classes = list(range(12))
for labels in (classes[:10], classes, [-1, 0, 1]):
    print(f"datasets {datasets.__version__}: classes {labels} become {encoded(labels)}")

table = Dataset.from_dict({"label": classes * 10})
try:
    table.train_test_split(test_size=24, stratify_by_column="label")
    raise AssertionError("a stratified split takes integers: the behaviour has changed")
except ValueError as error:
    print(f"a stratified split of the integers: {error}")
test = table.class_encode_column("label").train_test_split(test_size=24, stratify_by_column="label", seed=0)["test"]
names = test.features["label"].names
accuracy = sum(int(names[label]) == label for label in test["label"]) / len(test)
print(f"accuracy of a model that answers the old number of each row: {accuracy:.3f}")
assert table.cast_column("label", ClassLabel(num_classes=12))["label"][:12] == classes
assert encoded(classes[:10]) == classes[:10]
assert encoded(classes) == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3] and accuracy == 2 / 12, "the behaviour has changed"
PYTHON
