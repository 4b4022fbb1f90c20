"""Sentences with tags: the formats, the words that are cut off, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.load import load_data
from compress.reading.sentences import sentence_of
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split
from foundation.labels import tags
from tests import entities
from tests.problems import raises_problem

CONLL = "-DOCSTART- O\n\nAnn\tI-PER\nBobson\tI-PER\nin\tO\nNew\tI-LOC\nYork\tI-LOC\n\t\nbob  NNP  B-PER\nann  NNP  B-PER\n\n\n"


def load(folder: Path, names: tuple[str, ...] | None = None, length: int = 32) -> tuple[Data, list[str]]:
    lines: list[str] = []
    config = DataConfig(path=str(folder), max_length=length)
    return load_data(config, "token-classification", names, lines.append, str(entities.checkpoint())), lines


def named(data: Data, split: Split) -> list[tuple[str, list[str]]]:
    """The rows with the names of their tags."""
    count = len(data.labels)
    found = [[data.labels[tag] for tag in row[count:, 0].tolist() if tag != tags.NO_WORD] for row in split.labels.array]
    return list(zip(map(str, split.rows), found, strict=True))


def write(folder: Path, train: str, test: str) -> Path:
    (folder / "train.conll").write_text(train)
    (folder / "test.txt").write_text(test)
    return folder


def test_conll_of_any_scheme_becomes_one(tmp_path: Path) -> None:
    filler = "".join(f"rome{number} S-LOC\n\n" for number in range(20))
    data, lines = load(write(tmp_path, filler + "x B-PER\ny E-PER\n", CONLL))
    assert data.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert named(data, data.evaluation) == [
        ("Ann Bobson in New York", ["B-PER", "I-PER", "O", "B-LOC", "I-LOC"]),
        ("bob ann", ["B-PER", "B-PER"]),
    ]
    assert "data: test: 2 sentences, 7 words, 4 entities" in lines


def test_labels_hold_the_first_token_of_each_word(tmp_path: Path) -> None:
    data, _ = load(entities.write(tmp_path, {"train": 40, "test": 20}))
    engine, count = entities.tokenizer(), len(data.labels)
    for text, labels in zip(data.evaluation.rows, data.evaluation.labels.array, strict=True):
        row, words = engine.encode(str(text)), str(text).split(" ")
        naive = [len(engine.encode(" ".join(words[:number]), add_special_tokens=False).ids) + 1 for number in range(len(words))]
        assert labels[count : count + len(words), 1].tolist() == naive
        assert row.tokens[naive[0]] != "[CLS]"
    assert data.evaluation.labels.array[0, :count, 0].tolist() == tags.codes_of(data.labels).tolist()


def test_words_behind_the_maximum_are_counted_and_have_no_token(tmp_path: Path) -> None:
    rows = [{"tokens": ["the"] * 10 + ["oslo"], "labels": ["O"] * 10 + ["B-LOC"]}, {"tokens": ["ann"], "labels": ["B-PER"]}]
    train = [{"tokens": ["in", f"rome{'x' * number}"], "labels": ["O", "B-LOC"]} for number in range(30)] + rows[1:]
    for split, found in (("train", train), ("test", rows)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    data, lines = load(tmp_path, length=8)  # [CLS], six words and [SEP]
    assert any("test: 2 sentences, 12 words, 2 entities; 5 words have no token within data.max_length (8)" in line for line in lines)
    pieces = data.evaluation.labels.array[0, len(data.labels) :, 1]
    assert pieces.tolist() == [1, 2, 3, 4, 5, 6, -1, -1, -1, -1, -1]


def test_words_with_spaces_are_several_and_empty_ones_are_left_out() -> None:
    text, (words, spans) = sentence_of(["in", "New York", "", " ", "ann"], ["O", "B-LOC", "I-LOC", "B-X", "B-PER"], (), "x")
    assert (text, words, spans) == ("in New York ann", 4, [(1, 3, "LOC"), (3, 4, "PER")])


def test_numbered_tags_have_the_names_of_the_data_set() -> None:
    assert sentence_of(["ann", "in"], np.array([1, 0]), ("O", "B-PER"), "x") == ("ann in", (2, [(0, 1, "PER")]))


@pytest.mark.parametrize(
    ("words", "found", "line"),
    [
        (["a", "b"], ["O"], "x: 2 entries and 1 entries given as words and tags; two lists of the same length are allowed"),
        ("a b", ["O"], r"x: 'a b' and 1 entries given as words and tags"),
        (["a"], [3], r"x: tag 3; a name such as B-PER is allowed"),
        ([1], ["O"], "x: 1 given as word; valid Unicode text is allowed"),
        (["\ud800"], ["O"], r"given as word; valid Unicode text is allowed"),
    ],
)
def test_what_is_no_sentence_is_said_in_one_line(words: Any, found: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        sentence_of(words, found, (), "x")


def test_errors_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"test\.txt line 2: 'alone' has no tag"):
        load(write(tmp_path, "a B-PER\n", "b O\nalone\n"))


def test_a_kind_that_the_model_does_not_know_is_an_error(tmp_path: Path) -> None:
    with raises_problem("line 1", "'X'", "LOC, PER"):
        load(write(tmp_path, "a B-X\n", "b O\n"), entities.NAMES)
    with pytest.raises(InputError, match="one of them has to be O"):
        load(tmp_path, ("B-X", "I-X"))
