"""Data sets of sounds: class folders, archives, tables and Hub data sets give the same rows; what is no sound is refused."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.load import load_data
from compress.reading.unlabelled import read_unlabelled
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from tests import tiny_sounds
from tests.problems import raises_problem

TASK = "audio-classification"


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sounds.folder(tmp_path_factory.mktemp("sounds"), train=60, test=30)


def load(path: Path | str, task: str = TASK, **config: Any) -> Data:
    return load_data(DataConfig.model_validate({"path": str(path), **config}), task, None, lambda line: None)


def content(data: Data) -> set[tuple[bytes, str]]:
    return {
        (row, data.labels[label])
        for split in (data.train, data.selection, data.evaluation)
        for row, label in zip(split.rows, split.labels.array, strict=True)
    }


def test_folders_archives_and_tables_give_the_same_rows(sounds: Path, tmp_path: Path) -> None:
    files = sorted(sounds.glob("*/*/*.*"))
    expected = {(file.read_bytes(), file.parent.name) for file in files}
    assert len(expected) == 90
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(sounds, ".")
    (tmp_path / "tables").mkdir()
    for split in ("train", "test"):
        rows = [{"file": str(file), "label": file.parent.name} for file in files if file.parts[-3] == split]
        (tmp_path / "tables" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with (tmp_path / f"{split}.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["file", "label"])
            writer.writeheader()
            writer.writerows(rows)
    named = {"files": {"train": "train.csv", "test": "test.csv"}, "columns": {"audio": "file"}}
    for data in (
        load(sounds),
        load(tmp_path / "all.tar.gz"),
        load(tmp_path / "tables", columns={"audio": "file"}),
        load(tmp_path, **named),
    ):
        assert content(data) == expected
        assert (data.labels, len(data.evaluation)) == (tiny_sounds.CLASSES, 30)
    assert sorted(read_unlabelled(sounds / "test", "audio", ["audio"], "--column")) == sorted(
        file.read_bytes() for file in files if file.parts[-3] == "test"
    )


def test_a_hub_data_set_with_a_column_of_audio_is_not_decoded_by_the_library(sounds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"audio": stored, "label": datasets.ClassLabel(names=list(tiny_sounds.CLASSES))})
    splits = {}
    for split in ("train", "test"):
        files = sorted(sounds.glob(f"{split}/*/*.*"))
        cells = {"audio": [{"bytes": file.read_bytes(), "path": None} for file in files], "label": [file.parent.name for file in files]}
        splits[split] = datasets.Dataset.from_dict(cells, features=features).cast_column("audio", datasets.Audio())
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset: datasets.DatasetDict(splits))
    assert content(load("somebody/sounds")) == content(load(sounds))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.wav", b"no sound", "neither WAV nor FLAC"),
        ("x.wav", tiny_sounds.encoded(np.zeros(900, np.float32))[:400], "ends too early"),
        ("x.flac", b"fLaC" + bytes(50), "not a readable sound"),
        ("x.mp3", b"ID3", "not the name of a sound; WAV and FLAC sounds (.wav .flac) are allowed"),
        ("x.png", b"\x89PNG", "not the name of a sound"),
    ],
)
def test_what_is_no_sound_is_refused_with_its_place(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    (line,) = caught.value.lines
    assert words in line
    assert str(tmp_path / "train" / "a" / name) in line


def test_a_folder_without_sounds_and_other_tasks_are_refused(sounds: Path, tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no sounds; SPLIT/CLASS/FILE .*\(.wav .flac\)"):
        load(tmp_path)
    with pytest.raises(InputError, match="not the name of an image"):
        load(sounds, "image-classification")
    with raises_problem("data.path", "sklearn:digits: images", "model.task is audio-classification", "image-text or image-classification"):
        load("sklearn:digits")
    (tmp_path / "rows.csv").write_text("audio,label\nabsent.wav,a\n")
    with pytest.raises(InputError, match=r"rows.csv line 2: sound 'absent.wav' cannot be read"):
        load(tmp_path / "rows.csv")
