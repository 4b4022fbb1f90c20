"""Images with classes that are told by texts: rows, labels, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.load import load_data
from compress.reading.prompted_images import with_prompts
from compress.recipe import check
from export.parity.rows import gate_rows
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split
from foundation.labels import zero_shot
from foundation.labels.classes import ClassIds
from foundation.measure.engine_process import read_rows, write_rows
from foundation.models.inputs.tokenizer import TrainTokenizer
from tests import tiny_towers
from tests.problems import raises_problem
from tests.tiny_towers import TASK

TEMPLATES = ("a photo of a {}", "something {}", "{}!")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tiny_towers.folder(tmp_path_factory.mktemp("images"))
    return load_data(DataConfig(path=str(folder), prompts=TEMPLATES), TASK, None, lambda line: None)


def texts_of(name: str) -> set[str]:
    return {template.format(name.replace("_", " ")) for template in TEMPLATES}


def test_judged_splits_hold_every_image_and_then_every_text(data: Data) -> None:
    assert data.labels == ("deep_blue", "green", "red")
    for split, images in ((data.selection, 18), (data.evaluation, 42)):
        assert [type(row) for row in split.rows] == [bytes] * images + [str] * 9
        assert split.labels.array[:, 0].tolist() == [0] * images + [1] * 9
        assert split.labels.array[images:, 1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert (split.labels.array[:, 2] == zero_shot.NO_PAIR).all()
        assert split.together == 1
        for row, (_, number, _) in zip(split.rows[images:], split.labels.array[images:], strict=True):
            assert row in texts_of(data.labels[int(number)])
        assert len(set(split.rows[images:])) == 9
        assert len(split.labels.judged) == images


def test_train_rows_are_pairs_and_templates_take_turns(data: Data) -> None:
    split = data.train
    assert [type(row) for row in split.rows] == [bytes, str] * 72
    assert split.together == 2
    assert (split.labels.array[::2, 1:] == split.labels.array[1::2, 1:]).all()
    assert split.labels.array[::2, 2].tolist() == list(range(72))
    for number, name in enumerate(data.labels):
        labelled = zip(split.rows, split.labels.array, strict=True)
        told = Counter(row for row, label in labelled if isinstance(row, str) and label[1] == number)
        assert told.keys() == texts_of(name)
        assert max(told.values()) - min(told.values()) <= 1
    calibration = data.calibration(10)
    assert [type(row) for row in calibration.rows] == [bytes, str] * 5
    assert (calibration.labels.array[::2, 2] == calibration.labels.array[1::2, 2]).all()


def test_images_are_of_the_class_of_their_folder(data: Data) -> None:
    for split in (data.train, data.evaluation):
        for row, (side, number, _) in zip(split.rows, split.labels.array, strict=True):
            if side == zero_shot.IMAGE:
                import io

                from PIL import Image

                colour = np.asarray(Image.open(io.BytesIO(row))).mean(axis=(0, 1))  # type: ignore[arg-type]
                nearest = min(tiny_towers.COLOURS, key=lambda name: np.abs(colour - tiny_towers.COLOURS[name]).sum())
                assert nearest == data.labels[int(number)]


def test_choices_of_rows_keep_all_texts(data: Data) -> None:
    chosen = data.evaluation.labels.sample(20)
    assert sum(isinstance(data.evaluation.rows[row], str) for row in chosen) == 9
    assert len(chosen) == 20
    assert sum(isinstance(row, str) for row in gate_rows(data).rows) == 9


def test_rows_of_both_kinds_are_written_and_read(data: Data, tmp_path: Path) -> None:
    rows = [*data.evaluation.rows[38:46], "ü", ""]
    write_rows(tmp_path / "rows.safetensors", rows)
    assert read_rows(tmp_path / "rows.safetensors") == rows


def test_a_tokenizer_that_is_trained_marks_ends_alone(tmp_path: Path) -> None:
    folder = tiny_towers.folder(tmp_path)
    made = load_data(DataConfig(path=str(folder)), TASK, None, lambda line: None, TrainTokenizer(train="bpe", vocab_size=258)).tokenizer
    assert made is not None
    ids = made.tokenizer.encode("a photo of a red").ids
    assert ids.index(0) == len(ids) - 1  # CLIP reads a text at its first end token


def test_classes_with_the_same_text_are_refused() -> None:
    split = Split([b"x", b"y"], ClassIds(np.array([0, 1])))
    with raises_problem("images", "a_b and a b", "'a b'", "rename one of them"):
        with_prompts(Data(split, split, split, ("a_b", "a b")), ("{}",), "images", lambda line: None)


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (["a photo"], r"data.prompts.*'a photo' given; a text with one {}, where the name of a class goes, is allowed"),
        (["{} and {}"], r"a text with one {}"),
        (["{0} {}"], r"a text with one {}"),
        ([], r"data.prompts.*at least 1"),
    ],
)
def test_templates_without_one_place_are_refused(prompts: list[str], line: str, tmp_path: Path) -> None:
    whole: dict[str, Any] = tiny_towers.recipe(tmp_path, [{"finetune": {}}])
    whole["data"]["prompts"] = prompts
    with pytest.raises(InputError, match=line):
        check(whole)


@pytest.mark.parametrize(
    ("task", "prompts", "line"),
    [
        ("image-classification", ["a {}"], r"data.prompts: given for image-classification; they are for image-text"),
        (TASK, {"query": "a"}, r"data.prompts: a map given for image-text; a list of texts with {}, where the name of a class goes, is"),
        ("retrieval", ["a {}"], r"data.prompts: a list given for retrieval; a map with query and document is allowed"),
    ],
)
def test_prompts_of_another_form_are_refused(task: str, prompts: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line):
        load_data(DataConfig(path=str(tmp_path), prompts=prompts), task, None, lambda line: None)
