"""Cells with any number of labels: lists, texts with commas, ids, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from tests.problems import raises_problem

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
    assert data.evaluation.labels.array.dtype == np.bool_
    assert data.evaluation.labels.array.tolist() == [[False, True, False], [False, False, False], [True, False, True]]
    rows, labels = [*data.train.rows, *data.selection.rows], [*data.train.labels.array.tolist(), *data.selection.labels.array.tolist()]
    by_row = dict(zip(rows, labels, strict=True))
    assert by_row["train row 0"] == by_row["train row 1"] == [False, True, True]
    assert by_row["train row 2"] == by_row["train row 3"] == [False, False, False]


def test_names_of_the_model_are_kept(tmp_path: Path) -> None:
    data = load_data(write(tmp_path, {"train": [["b"], [0], []] * 4, "test": [["c", "b"]]}), TASK, ("a", "b", "c"), lambda _: None)
    assert data.labels == ("a", "b", "c")
    assert data.evaluation.labels.array.tolist() == [[False, True, True]]


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
    assert len(caught.value.lines) == 1


def test_a_label_that_train_lacks_is_named(tmp_path: Path) -> None:
    with raises_problem("test.jsonl line 2", "'bb'", "train split: aa, b"):
        load_data(write(tmp_path, {"train": [["aa"], ["b"]] * 3, "test": [["aa"], ["b", "bb"]]}), TASK, None, lambda _: None)


NAMES = ("a", "b", "c")
VECTORS: list[list[int]] = [[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1]] * 3
FORMS: dict[str, Any] = {
    "numbers": lambda vector: vector,
    "floats": lambda vector: [float(bit) for bit in vector],
    "booleans": lambda vector: [bool(bit) for bit in vector],
    "digits": lambda vector: [str(bit) for bit in vector],
    "text": lambda vector: ",".join(map(str, vector)),
    "text with spaces": lambda vector: ", ".join(map(str, vector)),
    "text of floats": lambda vector: ",".join(f"{bit}.0" for bit in vector),
    "text of a list": str,
    "text of an array": lambda vector: str(np.array(vector)),
    "text of an array of floats": lambda vector: str(np.array(vector, np.float32)),
}


def read(config: DataConfig, names: tuple[str, ...] | None) -> tuple[tuple[str, ...], dict[str, list[bool]]]:
    """Returns the names of the labels, and which hold for each row."""
    data = load_data(config, TASK, names, lambda _: None)
    assert data.labels is not None
    splits = (data.train, data.selection, data.evaluation)
    return data.labels, {str(row): label for split in splits for row, label in zip(split.rows, split.labels.array.tolist(), strict=True)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", [NAMES, ("0", "1", "2"), None])
def test_vectors_of_0_and_1_are_read_as_transformers_trains_on_them(names: tuple[str, ...] | None, form: str, tmp_path: Path) -> None:
    config = write(tmp_path, {"train": [FORMS[form](vector) for vector in VECTORS], "test": [FORMS[form](VECTORS[0])]})
    found, rows = read(config, names)
    assert found == (names or ("LABEL_0", "LABEL_1", "LABEL_2"))
    assert rows["test row 0"] == [False, True, False]
    for number, vector in enumerate(VECTORS):
        assert rows[f"train row {number}"] == [bool(bit) for bit in vector]


@pytest.mark.parametrize("kind", [pyarrow.int8(), pyarrow.float32(), pyarrow.bool_()])
def test_vectors_in_parquet_are_read_alike(kind: Any, tmp_path: Path) -> None:
    for split, vectors in {"train": VECTORS, "test": VECTORS[:1]}.items():
        cells = pyarrow.array([[kind.to_pandas_dtype()(bit) for bit in vector] for vector in vectors], pyarrow.list_(kind))
        texts = [f"{split} row {number}" for number in range(len(vectors))]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": cells}), tmp_path / f"{split}.parquet")
    _, rows = read(DataConfig(path=str(tmp_path)), NAMES)
    assert [rows[f"train row {number}"] for number in range(len(VECTORS))] == [list(map(bool, vector)) for vector in VECTORS]


def test_ids_stay_ids_and_a_key_decides_where_both_are_possible(tmp_path: Path) -> None:
    ids = write(tmp_path, {"train": [[0, 1], [1], [], [0]] * 4, "test": [[1]]})
    assert read(ids, NAMES)[1]["train row 0"] == [True, True, False]
    both = write(tmp_path, {"train": [[0, 1], [1, 0]] * 8, "test": [[0, 1]]})
    with raises_problem("jsonl line 1", "[0, 1]", "data.multi_hot: true for vectors, false for lists") as caught:
        read(both, ("a", "b"))
    assert len(caught.value.lines) == 1
    assert read(both.model_copy(update={"multi_hot": True}), ("a", "b"))[1]["test row 0"] == [False, True]
    assert read(both.model_copy(update={"multi_hot": False}), ("a", "b"))[1]["test row 0"] == [True, True]
    floats = write(tmp_path, {"train": [[0.0, 1.0], [1.0, 0.0]] * 8, "test": [[0.0, 1.0]]})
    assert read(floats, ("a", "b"))[1]["test row 0"] == [False, True]
    small = write(tmp_path, {"train": [[0, 1], [1, 1]] * 8, "test": [[0, 1]]})  # the train split shows what the test split means
    assert read(small, ("a", "b"))[1]["test row 0"] == [False, True]


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ([[0, 1, 1, 0]], r"train.jsonl line 1: labels \[0, 1, 1, 0\] have 4 numbers, and the model has 3 labels; .*data.multi_hot"),
        ([[0, 1, 1], [0, 1]], r"train.jsonl line 2: labels \[0, 1\] have 2 numbers, and the model has 3 labels"),
        ([[0, 1, 1], []], r"train.jsonl line 2: labels \[\] have 0 numbers"),
        ([[0, 0, 2]], r"train.jsonl line 1: labels \[0, 0, 2\]: a number is given twice; .*data.multi_hot"),
        ([[0.5, 0.0, 1.0]], r"train.jsonl line 1: labels \[0.5, 0.0, 1.0\]: 0.5 is no label"),
    ],
)
def test_what_is_neither_is_refused_in_one_line(train: list[Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        read(write(tmp_path, {"train": train, "test": [[1, 0, 1]]}), NAMES)
    assert len(caught.value.lines) == 1


def test_a_test_split_whose_vectors_are_minus_1_is_unlabelled(tmp_path: Path) -> None:
    config = write(tmp_path, {"train": VECTORS, "test": [[-1, -1, -1]] * 3, "validation": [[0, 0, 1]] * 3})
    data = load_data(config, TASK, NAMES, lambda _: None)
    assert data.evaluation.rows[0] == "validation row 0"


def test_the_key_is_for_sets_of_labels_alone(tmp_path: Path) -> None:
    config = write(tmp_path, {"train": ["a", "b"] * 8, "test": ["a"]}).model_copy(update={"multi_hot": True})
    with raises_problem("data.multi_hot", "true", "text-classification", "multi-label-classification"):
        load_data(config, "text-classification", None, lambda _: None)
