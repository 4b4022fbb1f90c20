"""`repeat` of a train file: its rows are trained on so many times, and nothing else changes, in every task that reads files."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.images import digits
from compress.reading.load import load_data
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, content_key
from foundation.models.inputs.tokenizer import TrainTokenizer
from foundation.standalone.preprocess import TokenPair
from foundation.standalone.windows import Window
from tests import tiny_sounds
from tests.problems import raises_problem

TIMES = 3
LETTERS = {"few": "abc", "many": "xyz", "more": "uvw", "test": "mno", "validation": "pqr"}
COUNTS = {"few": 30, "many": 35, "more": 25, "test": 20, "validation": 20}
TASKS = {
    "text-classification": lambda text, number, file: {"text": text, "label": number % 2},
    "multi-label-classification": lambda text, number, file: {"text": text, "label": [["p"], ["q", "r"]][number % 2]},
    "text-regression": lambda text, number, file: {"text": text, "label": number / 7},
    "token-classification": lambda text, number, file: {"tokens": text.split(), "labels": ["B-K", *["O"] * (len(text.split()) - 1)]},
    "question-answering": lambda text, number, file: {
        "question": text.split()[0],
        "context": text,
        "answers": {"text": [text.split()[1]], "answer_start": [text.index(" ") + 1]},
    },
    "text-to-text": lambda text, number, file: {"source": text, "target": "" if number % 9 == 4 else text[::-1]},
    "text-generation": lambda text, number, file: {"text": text},
    "sentence-embedding": lambda text, number, file: {"text": text, "text_pair": text[::-1], "label": number / 7},
    "sentence-triplets": lambda text, number, file: {"text": text, "text_pair": text[::-1], "negative": text[1:]},
    "image-classification": lambda text, number, file: {"image": file, "label": number % 2},
    "image-text-retrieval": lambda text, number, file: {"image": file, "text": [text, text[::-1]][: 1 + number % 2]},
    "speech-recognition": lambda text, number, file: {"audio": file, "text": ["one", "two", "three"][number % 3]},
}
"""A row of each task, made of a text and the name of a file."""


def words(letters: str, number: int) -> str:
    """Returns a text that is the only one with its number; all of its letters are among these."""
    known = ["".join(word) for word in itertools.product(letters, repeat=3)]
    return " ".join(known[digit] for digit in (number % 27, number // 27, 26 - number % 27, 5, number % 13))


def write(folder: Path, task: str, letters: str, name: str) -> None:
    files = itertools.islice(digits(), 40 * list(LETTERS).index(name), None) if task.startswith("image") else ()
    images, random, lines = [file.data for file in files], np.random.default_rng(ord(letters[0])), []
    for number in range(COUNTS[name]):
        file = f"{name}-{number}.{'wav' if task.startswith('speech') else 'png'}"
        if images:
            (folder / file).write_bytes(images[number])
        elif file.endswith("wav"):
            (folder / file).write_bytes(tiny_sounds.encoded(tiny_sounds.wave("noise", 0.03, random)))
        lines.append(json.dumps(TASKS[task](words(letters, number), number, file)))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def load(folder: Path, task: Any, repeat: int, *, labelled: bool = True, length: int = 16, **files: str) -> Data:
    train = ["many.jsonl", {"file": "few.jsonl", "repeat": repeat}, "more.jsonl"]  # blocks begin and end in the middle one
    columns = {"negative": "negative"} if task == "sentence-triplets" else {}
    config = {"path": str(folder), "max_length": length, "columns": columns, "files": {"train": train, **files}, "train_labels": labelled}
    trained = None if task.startswith(("image-c", "speech")) else TrainTokenizer(train="bpe", vocab_size=300)
    return load_data(DataConfig.model_validate(config), task, None, lambda line: None, trained)


def counted(data: Data, folder: Path) -> Counter[tuple[str, bytes]]:
    """Returns how often a pass takes each row with its label, and which file it is of."""
    few = {file.read_bytes() for file in folder.glob("few-*.*")}

    def text(row: Any) -> str:
        if isinstance(row, bytes):
            return "a" if row in few else "x"
        if isinstance(row, TokenPair | np.ndarray):
            assert data.tokenizer is not None
            return str(data.tokenizer.tokenizer.decode([*(row.source if isinstance(row, TokenPair) else row)]))
        return row.context if isinstance(row, Window) else row[0] if isinstance(row, tuple) else str(row)

    found: Counter[tuple[str, bytes]] = Counter()
    for row, key in zip(data.train.rows, data.train.keys, strict=True):
        found["few" if set(text(row)) & set(LETTERS["few"]) else "many", key] += 1
    return found


def contents(split: Split) -> tuple[list[bytes], list[Any]]:
    return split.keys, split.labels.array.tolist()


@pytest.mark.parametrize("task", TASKS)
def test_rows_of_a_file_are_trained_on_so_many_times_and_nothing_else_changes(task: str, tmp_path: Path) -> None:
    for name, letters in LETTERS.items():
        write(tmp_path, task, letters, name)
    files = [{"test": "test.jsonl"}, {"test": "test.jsonl", "validation": "validation.jsonl"}]
    files += [{}] if task.startswith("text-") and task.endswith(("text", "generation")) else []  # others need a test split
    for named in files:
        once, repeated = (load(tmp_path, task, repeat, **named) for repeat in (1, TIMES))
        single = counted(once, tmp_path)
        assert {name for name, _ in single} == {"few", "many"}
        assert counted(repeated, tmp_path) == {
            (name, key): count * (TIMES if name == "few" else 1) for (name, key), count in single.items()
        }
        assert [contents(split) for split in (repeated.selection, repeated.evaluation)] == [
            contents(split) for split in (once.selection, once.evaluation)
        ]
        assert all(split.repeats is None for split in (repeated.train, repeated.selection, repeated.evaluation))
        again = load(tmp_path, task, TIMES + 1, **named)
        assert len({once.digest, repeated.digest, again.digest}) == 3
        assert len(again.train) - len(repeated.train) == (len(repeated.train) - len(once.train)) // (TIMES - 1)


def test_labels_stay_with_the_rows_that_repeat(tmp_path: Path) -> None:
    for name, letters in LETTERS.items():
        write(tmp_path, "text-classification", letters, name)
    data = load(tmp_path, "text-classification", TIMES, test="test.jsonl", validation="validation.jsonl")
    given = {words(LETTERS[name], number): number % 2 for name in ("few", "many", "more") for number in range(COUNTS[name])}
    assert [given[str(row)] for row in data.train.rows] == data.train.labels.array.tolist()
    assert all(row != following for row, following in itertools.pairwise(data.train.rows))
    blank = load(tmp_path, "text-classification", TIMES, labelled=False, test="test.jsonl", validation="validation.jsonl")
    assert blank.train.rows == data.train.rows
    assert not blank.train.labels.KNOWN


def test_copies_of_an_image_are_one_image_to_a_loss(tmp_path: Path) -> None:
    for name, letters in LETTERS.items():
        write(tmp_path, "image-text-retrieval", letters, name)
    split = load(tmp_path, "image-text-retrieval", TIMES, test="test.jsonl").train
    numbers: dict[Any, set[int]] = {}
    for row, (side, number, _) in zip(split.rows, split.labels.array.astype(int).tolist(), strict=True):
        if side == 0:
            numbers.setdefault(row, set()).add(number)
    assert all(len(found) == 1 for found in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)
    pairs = split.labels.array[::2, 2].tolist()
    assert pairs == [*range(len(split) // 2)]


def test_an_image_of_several_files_repeats_as_often_as_the_file_that_repeats_most(tmp_path: Path) -> None:
    for name, letters in LETTERS.items():
        write(tmp_path, "image-text-retrieval", letters, name)
    for name in ("many", "more"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"image": "few-0.png", "text": name}) + "\n")
    counts = Counter(load(tmp_path, "image-text-retrieval", TIMES, test="test.jsonl", validation="validation.jsonl").train.rows)
    assert (counts["many"], counts["more"]) == (TIMES, TIMES)


def test_a_file_without_text_moves_no_repeats_to_another(tmp_path: Path) -> None:
    for name, letters in LETTERS.items():
        write(tmp_path, "text-generation", letters, name)
    for name in ("many", "more"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": ""}\n' + (tmp_path / "more.jsonl").read_text() * (name == "more"))
    for length, files in itertools.product(range(8, 32), ({}, {"test": "test.jsonl"})):  # at some length a block ends where a file does
        data = load(tmp_path, "text-generation", TIMES, length=length, **files)
        assert data.tokenizer is not None
        end = data.tokenizer.ids["eos_token_id"]  # a block that begins with it may begin with that of the file that repeats
        begun = {content_key(row) for row in data.train.rows if isinstance(row, np.ndarray) and row[0] == end}
        found = {(name, count) for (name, key), count in counted(data, tmp_path).items() if key not in begun}
        assert found == {("few", TIMES), ("many", 1)}


def test_a_mistake_in_a_file_that_repeats_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": null}\n')
    for name in ("many", "more", "test"):
        write(tmp_path, "text-classification", LETTERS[name], name)
    with raises_problem("few.jsonl line 2", "no label") as error:
        load(tmp_path, "text-classification", 1000, test="test.jsonl")
    assert len(error.value.problems) == 1
    assert "more rows" not in str(error.value)
