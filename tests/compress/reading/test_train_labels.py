"""Train rows without labels (`data.train_labels: false`): what is read, what names the classes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.core.errors import InputError
from tests.compress.reading.test_load import hub, hub_split, load, numbered, write_tsv
from tests.problems import raises_problem

TEXTS = [(f"plain {i}",) for i in range(30)]


def folder(path: Path, train: list[tuple[Any, ...]] = TEXTS, header: str = "text") -> Path:
    write_tsv(path / "train.tsv", train, header)
    write_tsv(path / "validation.tsv", numbered("validation", 6))
    write_tsv(path / "test.tsv", numbered("test", 8))
    return path


def test_rows_come_without_labels_and_classes_from_the_other_splits(tmp_path: Path) -> None:
    data, _ = load(folder(tmp_path), train_labels=False)
    assert data.train.rows == [text for (text,) in TEXTS]
    assert data.labels == ("0", "1")
    assert [split.labels.KNOWN for split in (data.train, data.selection, data.evaluation)] == [False, True, True]
    assert data.selection.rows == [f"validation {i}" for i in range(6)]
    assert data.selection.labels.array.tolist() == [0, 1] * 3


def test_no_choice_of_rows_makes_labels_known(tmp_path: Path) -> None:
    train = load(folder(tmp_path), train_labels=False)[0].train
    joined = train.labels.joined(train.labels.blank(3))
    chosen = (train.take([2, 0]).labels, train.take_runs([1]).labels, train.labels[1:4], joined, train.labels.renumber(np.ones(30, int)))
    assert not any(labels.KNOWN for labels in chosen)
    assert [len(labels) for labels in chosen] == [2, 1, 3, 33, 30]


@pytest.mark.parametrize("cell", ["", "nonsense", "-1", "nan"])
def test_a_column_of_labels_is_not_read(tmp_path: Path, cell: str) -> None:
    rows = [(text, cell) for (text,) in TEXTS]
    with_column = load(folder(tmp_path, rows, "text\tlabel"), train_labels=False)[0]
    (tmp_path / "plain").mkdir()
    assert with_column.digest == load(folder(tmp_path / "plain"), train_labels=False)[0].digest


def test_classes_of_the_model_keep_their_numbers(tmp_path: Path) -> None:
    for split in ("validation", "test"):
        write_tsv(tmp_path / f"{split}.tsv", [(f"{split} {i}", ("bad", "good")[i % 2]) for i in range(6)])
    write_tsv(tmp_path / "train.tsv", TEXTS, "text")
    data, _ = load(tmp_path, names=("good", "bad"), train_labels=False)
    assert data.evaluation.labels.array.tolist() == [1, 0] * 3


@pytest.mark.parametrize("has_column", [False, True])
def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch, has_column: bool) -> None:
    train = hub_split([text for (text,) in TEXTS], [-1] * len(TEXTS), ["no", "yes"])
    splits = {
        "train": train if has_column else train.remove_columns("label"),
        "validation": hub_split(["x", "y"], [1, 0], ["no", "yes"]),
        "test": hub_split(["z", "w"], [0, 1], ["no", "yes"]),
    }
    hub(monkeypatch, splits)
    data, _ = load("owner/name", columns={"text": "sentence"}, train_labels=False)
    assert data.train.rows == [text for (text,) in TEXTS]
    assert data.labels == ("no", "yes")
    assert data.evaluation.labels.array.tolist() == [0, 1]
    hub(monkeypatch, {**splits, "test": splits["test"].remove_columns("label")})
    with raises_problem("split test", "'label'"):
        load("owner/name", columns={"text": "sentence"}, train_labels=False)


def test_the_column_is_needed_without_the_key(tmp_path: Path) -> None:
    with raises_problem("train.tsv", "'label'"):
        load(folder(tmp_path))
    write_tsv(tmp_path / "train.tsv", [(text, -1) for (text,) in TEXTS])
    with raises_problem("train.tsv", "-1", "data.train_labels"):
        load(tmp_path)


@pytest.mark.parametrize("absent", ["validation", "test"])
def test_decisions_and_results_need_labelled_rows(tmp_path: Path, absent: str) -> None:
    (folder(tmp_path) / f"{absent}.tsv").unlink()
    with raises_problem("data.train_labels", "false", absent):
        load(tmp_path, train_labels=False)


def test_an_unlabelled_test_split_is_none(tmp_path: Path) -> None:
    write_tsv(folder(tmp_path) / "test.tsv", [("row", -1)])
    with raises_problem("data.train_labels", "test"):
        load(tmp_path, train_labels=False)


def test_validation_rows_that_are_all_in_test(tmp_path: Path) -> None:
    write_tsv(folder(tmp_path) / "validation.tsv", numbered("test", 4))
    with pytest.raises(InputError, match="validation rows are test rows"):
        load(tmp_path, train_labels=False)


@pytest.mark.parametrize("task", ["text-regression", "multi-label-classification"])
def test_tasks_with_other_answers(tmp_path: Path, task: str) -> None:
    with raises_problem("data.train_labels", "false", task, "text-classification"):
        load(folder(tmp_path), task, train_labels=False)
