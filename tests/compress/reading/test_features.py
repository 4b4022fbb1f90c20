"""Classes that the datasets library numbers: their names count, whatever order a model has them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value

from compress.reading.features import label_names_of, names_in
from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import Columns, DataConfig
from foundation.data.splits import Data
from foundation.data.tables import Table
from tests import entities

MODEL = ("negative", "neutral", "positive")
FILE = ("positive", "negative", "neutral")
GIVEN = ["negative", "neutral", "positive", "neutral"] * 5


def write(folder: Path, feature: Any, labels: list[Any], splits: tuple[str, ...] = ("train", "test")) -> None:
    """Writes parquet files with the library; labels are encoded by it."""
    datasets.disable_progress_bars()
    features = Features({"text": Value("string"), "label": feature})
    for split in splits:
        rows = [features.encode_example({"text": f"{split} row {number}", "label": label}) for number, label in enumerate(labels)]
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}.parquet")


def write_lines(folder: Path, count: int, splits: tuple[str, ...] = ("train", "test")) -> None:
    """Writes lines of JSON that number their classes."""
    for split in splits:
        lines = [json.dumps({"text": f"{split} row {number}", "label": number % 3}) for number in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def by_row(data: Data) -> dict[str, Any]:
    splits = (data.train, data.selection, data.evaluation)
    return {str(row): label for split in splits for row, label in zip(split.rows, split.labels.array.tolist(), strict=True)}


@pytest.mark.parametrize("names", [MODEL, tuple(name.upper() for name in MODEL), tuple(f" {name}" for name in MODEL), None])
def test_a_column_of_classes_is_matched_with_the_model_by_name(names: tuple[str, ...] | None, tmp_path: Path) -> None:
    write(tmp_path, ClassLabel(names=list(FILE)), GIVEN)
    data = load_data(DataConfig(path=str(tmp_path)), "text-classification", names, lambda _: None)
    assert data.labels == (names or FILE)
    order = MODEL if names else FILE
    for number, name in enumerate(GIVEN):
        assert by_row(data)[f"train row {number}"] == by_row(data)[f"test row {number}"] == order.index(name)


@pytest.mark.parametrize("kind", [List, LargeList, lambda feature: [feature], lambda feature: List(feature, length=2)])
def test_so_are_the_members_of_sets_of_labels(kind: Any, tmp_path: Path) -> None:
    write(tmp_path, kind(ClassLabel(names=list(FILE))), [["negative", "positive"], ["neutral", "positive"]] * 10)
    data = load_data(DataConfig(path=str(tmp_path)), "multi-label-classification", MODEL, lambda _: None)
    assert by_row(data)["train row 0"] == [True, False, True]
    assert by_row(data)["train row 1"] == [False, True, True]


def test_so_are_the_tags_of_words(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    names = ["I-LOC", "O", "B-PER", "B-LOC", "I-PER"]
    features = Features({"tokens": List(Value("string")), "labels": List(ClassLabel(names=names))})
    tags = [["B-PER", "I-PER", "O"], ["O", "B-LOC", "O"]] * 10
    for split in ("train", "test"):
        rows = [features.encode_example({"tokens": ["anna", split, str(n)], "labels": row}) for n, row in enumerate(tags)]
        Dataset.from_list(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
    for own in (("O", "B-LOC", "I-LOC", " B-per", "I-per"), None):
        data = load_data(DataConfig(path=str(tmp_path)), "token-classification", own, lambda _: None, str(entities.checkpoint()))
        assert data.labels == (own or tuple(names))
        for row, label in zip(data.evaluation.rows, data.evaluation.labels.array, strict=True):
            found = [data.labels[tag].strip().upper() for tag in label[len(data.labels) :, 0] if tag >= 0]
            assert found == tags[int(str(row).split()[2])]


def test_numbers_beside_a_file_with_names_are_numbers_of_these(tmp_path: Path) -> None:
    write(tmp_path, ClassLabel(names=list(FILE)), GIVEN, ("train",))
    write_lines(tmp_path, 6, ("test",))
    assert by_row(load_data(DataConfig(path=str(tmp_path)), "text-classification", None, lambda _: None))["test row 2"] == 2


def test_files_that_number_the_same_names_differently_are_one_data_set(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    write(one, ClassLabel(names=list(FILE)), GIVEN, ("train", "test"))
    write(other, ClassLabel(names=["neutral", "mixed", "positive"]), ["mixed", "positive", "neutral"] * 5, ("more",))
    files: Any = {"train": ["one/train.parquet", "other/more.parquet"], "test": "one/test.parquet"}
    data = load_data(DataConfig(path=str(tmp_path), files=files), "text-classification", None, lambda _: None)
    assert data.labels == (*FILE, "mixed")
    rows = by_row(data)
    assert [rows[f"more row {number}"] for number in range(3)] == [3, 0, 2]
    assert [rows[f"train row {number}"] for number in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("nested", [False, True])
def test_dataset_info_beside_a_table_names_its_classes(nested: bool, tmp_path: Path) -> None:
    folder = tmp_path / "data" if nested else tmp_path
    folder.mkdir(exist_ok=True)
    Dataset.from_dict({"label": [0]}, features=Features({"label": ClassLabel(names=list(FILE))})).info.write_to_directory(tmp_path)
    write_lines(folder, 12)
    rows = by_row(load_data(DataConfig(path=str(folder)), "text-classification", MODEL, lambda _: None))
    assert [rows[f"train row {number}"] for number in range(3)] == [2, 0, 1]


def test_names_that_differ_are_matched_by_place_and_said_so_unless_one_contradicts_it(tmp_path: Path) -> None:
    write(tmp_path, ClassLabel(names=["bad", "so so", "good"]), ["bad", "so so", "good"] * 5)
    told: list[str] = []
    data = load_data(DataConfig(path=str(tmp_path)), "text-classification", MODEL, told.append)
    assert [by_row(data)[f"train row {number}"] for number in range(3)] == [0, 1, 2]
    assert any("by their place" in line and "'so so' = 'neutral'" in line for line in told)
    with pytest.raises(InputError, match=r"\(bad, so so, good\), the model has 3 \(good, fair, bad\)"):
        load_data(DataConfig(path=str(tmp_path)), "text-classification", ("good", "fair", "bad"), told.append)
    told.clear()
    load_data(DataConfig(path=str(tmp_path)), "text-classification", ("LABEL_0", "LABEL_1", "LABEL_2"), told.append)
    assert not any("by their place" in line for line in told)


def test_integers_that_the_library_sorted_as_text_are_said_to_be_matched_by_place(tmp_path: Path) -> None:
    """`class_encode_column` of datasets 5.2 calls class 2 of twelve "10"; a model's LABEL_2 may be either."""
    datasets.disable_progress_bars()
    for split in ("train", "test"):
        rows = {"text": [f"{split} row {number}" for number in range(24)], "label": [number % 12 for number in range(24)]}
        Dataset.from_dict(rows).class_encode_column("label").to_parquet(tmp_path / f"{split}.parquet")
    told: list[str] = []
    names = tuple(f"LABEL_{index}" for index in range(12))
    data = load_data(DataConfig(path=str(tmp_path)), "text-classification", names, told.append)
    assert by_row(data)["train row 2"] == 4
    assert any("by their place" in line and "'10' = 'LABEL_2'" in line and "'0'" not in line for line in told)
    told.clear()
    for own in (tuple(map(str, range(12))), names):
        write(tmp_path, ClassLabel(names=list(own)), list(own) * 2)
        load_data(DataConfig(path=str(tmp_path)), "text-classification", names, told.append)
    assert not any("by their place" in line for line in told)


def test_every_kind_of_list_that_the_library_writes_is_looked_into(tmp_path: Path) -> None:
    label = ClassLabel(names=["a", "b"])
    written = Features({"one": label, "two": List(label), "three": List(List(label)), "four": LargeList(label), "none": Value("int64")})
    rows = {"one": [0], "two": [[0]], "three": [[[1]]], "four": [[1]], "none": [1]}
    Dataset.from_dict(rows, features=written).to_parquet(tmp_path / "train.parquet")
    table = Table(tmp_path / "train.parquet", ())
    assert [label_names_of(table, name) for name in (*written, "absent", 0)] == [("a", "b")] * 4 + [()] * 3
    assert names_in([label.__dict__ | {"_type": "ClassLabel"}], "here") == ("a", "b")  # as versions before 4 wrote lists
    assert names_in({"feature": {"names": ["a", "b"], "_type": "ClassLabel"}, "_type": "Sequence"}, "here") == ("a", "b")


@pytest.mark.parametrize("names", [["a", "a"], ["a", 3], ["a", " "], {"a": 0}])
def test_damaged_names_are_refused_in_one_line(names: Any, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x", "y"], "label": [0, 1]})
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"train.parquet: .*column 'label': names its classes") as caught:
        load_data(DataConfig(path=str(tmp_path)), "text-classification", None, lambda _: None)
    assert len(caught.value.lines) == 1


def test_files_without_names_are_read_as_before(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table = pyarrow.table({"sentence": [f"{split} row {number}" for number in range(9)], "label": np.arange(9) % 3})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
    data = load_data(DataConfig(path=str(tmp_path), columns=Columns(text="sentence")), "text-classification", MODEL, lambda _: None)
    assert by_row(data)["train row 2"] == 2
