"""Images with captions: rows, labels, images that occur in several rows, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from foundation.labels import captions, zero_shot
from tests import tiny_captions
from tests.problems import raises_problem
from tests.tiny_captions import TASK

pytestmark = pytest.mark.whole


def load(folder: Path, **more: Any) -> Data:
    given = {"path": str(folder), "columns": {"text": "caption"}, **more}
    return load_data(DataConfig.model_validate(given), TASK, None, lambda line: None)


def belongs(data: Data) -> dict[bytes, set[str]]:
    """Returns the captions of each image by what the labels of all splits say."""
    told: dict[bytes, set[str]] = {}
    for split in (data.train, data.selection, data.evaluation):
        images = {int(label[1]): row for row, label in zip(split.rows, split.labels.array, strict=True) if isinstance(row, bytes)}
        for row, label in zip(split.rows, split.labels.array, strict=True):
            if isinstance(row, str):
                told.setdefault(images[int(label[1])], set()).add(row)  # type: ignore[arg-type]
    return told


def written(folder: Path) -> dict[bytes, set[str]]:
    found: dict[bytes, set[str]] = {}
    for name in ("train", "test"):
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            texts = row["caption"] if isinstance(row["caption"], list) else [row["caption"]]
            found.setdefault((folder / row["image"]).read_bytes(), set()).update(texts)
    return found


def test_every_caption_belongs_to_its_image_in_every_split(tmp_path: Path) -> None:
    folder = tiny_captions.folder(tmp_path, train=60, test=20)
    data = load(folder)
    assert belongs(data) == written(folder)
    assert data.labels == ()
    for split in (data.selection, data.evaluation):
        images, texts = split.labels.sides()
        assert images.tolist() == list(range(len(images)))  # images first
        assert len(images) + len(texts) == len(split)
        assert isinstance(split.labels, captions.Captions)
        assert split.together == 1
        assert len(split.labels.judged) == len(images)
    assert len(data.evaluation) == 20 + 10 * 1 + 10 * 2  # every other image has two captions


def test_train_rows_are_pairs(tmp_path: Path) -> None:
    data = load(tiny_captions.folder(tmp_path, train=60, test=20))
    split = data.train
    assert [type(row) for row in split.rows] == [bytes, str] * (len(split) // 2)
    assert split.together == 2
    assert (split.labels.array[::2, 1:] == split.labels.array[1::2, 1:]).all()
    assert split.labels.array[::2, 2].tolist() == list(range(len(split) // 2))
    assert split.labels.array[:, 0].tolist() == [zero_shot.IMAGE, zero_shot.TEXT] * (len(split) // 2)
    assert data.calibration(8).together == 2


def test_rows_with_the_same_image_are_one_image_and_a_caption_counts_once(tmp_path: Path) -> None:
    tiny_captions.folder(tmp_path, train=12, test=4)
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write(json.dumps({"image": "images/test-0.png", "caption": ["a new one", "a new one"]}) + "\n")
    images, texts = (load(tmp_path).evaluation.labels).sides()
    assert (len(images), len(texts)) == (4, 2 * 1 + 2 * 2 + 1)


def test_a_single_file_is_divided_with_its_captions(tmp_path: Path) -> None:
    folder = tiny_captions.folder(tmp_path, train=50, test=1)
    data = load(folder / "train.jsonl")
    assert len(data.evaluation.labels.judged) == 10
    known = written(folder)
    assert all(known[image] == texts for image, texts in belongs(data).items())
    assert len(belongs(data)) == 50


def test_tables_of_parquet_and_of_texts_are_read_alike(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = tiny_captions.folder(tmp_path / "json", train=12, test=4)
    (tmp_path / "parquet").mkdir()
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        table = {
            "image": [{"bytes": (folder / row["image"]).read_bytes(), "path": None} for row in rows],
            "caption": [row["caption"] if isinstance(row["caption"], list) else [row["caption"]] for row in rows],
        }
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "parquet" / f"{name}.parquet")
    assert load(tmp_path / "parquet").digest == load(folder).digest


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ([], "test.jsonl line 5: no caption given; an image needs at least one"),
        (" ", "test.jsonl line 5: ' ' given as caption; a text, or a list of texts, is allowed"),
        (None, "test.jsonl line 5: None given as caption"),
        (7, "test.jsonl line 5: 7 given as caption"),
        (["a five", None], "test.jsonl line 5: None given as caption"),
        (["a five", ["a"]], r"test.jsonl line 5: \['a'\] given as caption"),
        ("a \ud800", "test.jsonl line 5: .* given as caption"),
    ],
)
def test_rows_without_captions_are_refused_in_one_line(cell: Any, line: str, tmp_path: Path) -> None:
    tiny_captions.folder(tmp_path, train=12, test=4)
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write(json.dumps({"image": "images/test-0.png", "caption": cell}) + "\n")
    with pytest.raises(InputError, match=line) as caught:
        load(tmp_path)
    assert len(caught.value.lines) == 1


def test_many_bad_rows_are_three_lines_and_a_number(tmp_path: Path) -> None:
    tiny_captions.folder(tmp_path, train=12, test=4)
    (tmp_path / "test.jsonl").write_text((json.dumps({"image": "images/test-0.png", "caption": ""}) + "\n") * 6)
    with pytest.raises(InputError, match=r"test.jsonl: 3 more rows like these") as caught:
        load(tmp_path)
    assert len(caught.value.lines) == 4


def test_images_that_are_none_are_refused_with_their_place(tmp_path: Path) -> None:
    tiny_captions.folder(tmp_path, train=12, test=4)
    (tmp_path / "images" / "train-3.png").write_bytes(base64.b64decode("aaaa"))
    with pytest.raises(InputError, match=r"train.jsonl line 4: .*PNG or JPEG"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["sklearn:digits", "folders"])
def test_images_of_classes_are_refused(path: str, tmp_path: Path) -> None:
    from tests import tiny_towers

    given = str(tiny_towers.folder(tmp_path)) if path == "folders" else path
    with pytest.raises(InputError, match=rf"{TASK}.*captions"):
        load_data(DataConfig(path=given), TASK, None, lambda line: None)


def test_prompts_are_refused(tmp_path: Path) -> None:
    with raises_problem("data.prompts", TASK, "image-text, retrieval or reranking", "leave it out"):
        load(tmp_path, prompts=["a {}"])


def test_choices_of_rows_hold_both_sides(tmp_path: Path) -> None:
    from export.parity.rows import gate_rows

    data = load(tiny_captions.folder(tmp_path, train=60, test=20))
    assert {type(row) for row in gate_rows(data).rows} == {bytes, str}
    assert np.isin([0, 1], data.calibration(8).labels.array[:, 0]).all()
