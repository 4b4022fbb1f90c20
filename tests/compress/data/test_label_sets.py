"""Cells with any number of labels: lists, texts with commas, ids, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import InputError
from compress.data.config import DataConfig
from compress.data.load import load_data

TASK = "multi-label-classification"


def write(folder: Path, cells: dict[str, list[Any]]) -> DataConfig:
    for split, labels in cells.items():
        rows = [{"text": f"{split} row {number}", "label": label} for number, label in enumerate(labels)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=str(folder))


def test_lists_and_texts_say_the_same(tmp_path: Path) -> None:
    train: list[Any] = [["joy", "fear"], "joy, fear", [], "", "anger", ["fear"]] * 4
    data = load_data(write(tmp_path, {"train": train, "test": [["fear"], [], "joy,anger"]}), TASK, None, lambda _: None)
    assert data.labels == ("anger", "fear", "joy")
    assert data.evaluation.labels.dtype == np.bool_
    assert data.evaluation.labels.tolist() == [[False, True, False], [False, False, False], [True, False, True]]
    rows, labels = [*data.train.rows, *data.selection.rows], [*data.train.labels.tolist(), *data.selection.labels.tolist()]
    by_row = dict(zip(rows, labels, strict=True))
    assert by_row["train row 0"] == by_row["train row 1"] == [False, True, True]
    assert by_row["train row 2"] == by_row["train row 3"] == [False, False, False]


def test_names_of_the_model_are_kept(tmp_path: Path) -> None:
    data = load_data(write(tmp_path, {"train": [["b"], [0], []] * 4, "test": [["c", "b"]]}), TASK, ("a", "b", "c"), lambda _: None)
    assert data.labels == ("a", "b", "c")
    assert data.evaluation.labels.tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        (None, r"train.jsonl line 3: labels None; a list of labels, or a text with commas between them, is allowed"),
        ({"a": 1}, r"train.jsonl line 3: labels \{'a': 1\}; a list"),
        (["a", "nan"], r"train.jsonl line 3: no label \('nan'\)"),
    ],
)
def test_other_cells_are_refused_with_their_place(tmp_path: Path, cell: Any, line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        load_data(write(tmp_path, {"train": [["a"], ["b"], cell], "test": [["a"]]}), TASK, None, lambda _: None)
    assert len(caught.value.problems) == 1


def test_a_label_that_train_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"test.jsonl line 2: label 'bb'; allowed by the train split: aa, b"):
        load_data(write(tmp_path, {"train": [["aa"], ["b"]] * 3, "test": [["aa"], ["b", "bb"]]}), TASK, None, lambda _: None)
