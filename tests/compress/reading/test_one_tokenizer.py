"""Data are cut by the tokenizer.json that engines and server read: answers, tags, windows, pairs and blocks are where these see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from compress.reading.load import load_data
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from foundation.labels.tags import first_pieces
from foundation.labels.tasks import Task
from foundation.standalone.preprocess import TokenPair
from foundation.standalone.windows import Window, paired
from tests.foundation.models.inputs import test_tokenizer_file as folders

# One character for the class of Transformers 5, and several for a file that normalizes compatibility forms.
LONGER = ["well\u2026", "\u00bd", "\ufb01ne"]


@pytest.fixture(scope="module", params=["deberta", "t5"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, kind = folders.CASES[request.param]
    return folders.write(tmp_path_factory.mktemp("tokenizer"), made, kind, eos_token="</s>")


def load(folder: Path, tokenizer: Path, task: Task, rows: list[dict[str, Any]], **settings: Any) -> tuple[Data, Tokenizer]:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "test.jsonl").write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    config = DataConfig(path=str(folder), **{"max_length": 24, **settings})
    return load_data(config, task, None, lambda line: None, str(tokenizer)), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))


def test_answers_to_questions_are_where_the_file_puts_them(tokenizer: Path, tmp_path: Path) -> None:
    rows = []
    for number in range(6):
        context = f"{' '.join(LONGER[: number % 3 + 1])} gold{number} is here"
        answers = {"text": [f"gold{number}"], "answer_start": [context.index("gold")]}
        rows.append({"id": str(number), "question": "what", "context": context, "answers": answers})
    data, file = load(tmp_path, tokenizer, "question-answering", rows, max_length=40, stride=8)
    for window, labels in zip(data.train.rows, data.train.labels.array, strict=True):
        assert isinstance(window, Window)
        (tokens,) = paired(file, [(window.question, window.context)])
        first, last = labels[0, 0] - tokens.first
        characters = tokens.characters[window.start : window.stop]
        assert window.context[characters[first, 0] : characters[last, 1]].strip() == window.context.split()[-3]


def test_tags_are_on_the_tokens_of_the_file(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"tokens": [*LONGER, f"ann{number}"], "labels": [*(["O"] * 3), "B-PER"]} for number in range(6)]
    data, file = load(tmp_path, tokenizer, "token-classification", rows)
    places = first_pieces(file, [str(row) for row in data.train.rows])
    for labels, expected in zip(data.train.labels.array, places, strict=True):
        assert labels[-len(expected) :, 1].tolist() == list(expected)


def test_windows_of_texts_are_those_of_the_file(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{' '.join(LONGER)} {number} {'a b ' * number}", "label": "no" if number % 2 else "yes"} for number in range(6)]
    data, file = load(
        tmp_path,
        tokenizer,
        "text-classification",
        rows,
        max_length=9,
        windows={"stride": 2, "aggregate": "mean"},
        keep_evaluation_rows=True,
    )
    file.enable_truncation(9, stride=2)
    expected = sum(1 + len(file.encode(row["text"]).overflowing) for row in rows)
    assert len(data.train) + len(data.selection) >= len(data.train) == expected - _windows(file, [str(row) for row in data.selection.rows])


def _windows(file: Tokenizer, texts: list[str]) -> int:
    return sum(1 + len(file.encode(text).overflowing) for text in texts)


def test_pairs_and_blocks_have_the_ids_of_the_file(tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        {"source": f"{' '.join(LONGER)} {letter}", "target": f"{LONGER[place % 3]} b {letter}"} for place, letter in enumerate("abcdef")
    ]
    data, file = load(tmp_path, tokenizer, "text-to-text", rows, max_length=64)
    encoded = {tuple(file.encode(row["source"]).ids): file.encode(row["target"]).ids for row in rows}
    for row in data.train.rows:
        assert isinstance(row, TokenPair)
        assert row.target.tolist() in ([*ids, 1] for ids in [encoded[tuple(row.source.tolist())]])
    texts = [{"text": " ".join([*LONGER, str(number)])} for number in range(6)]
    blocks, _ = load(tmp_path, tokenizer, "text-generation", texts, max_length=8)
    joined = [id for row in blocks.evaluation.rows for id in np.asarray(row).tolist()]
    assert joined == file.encode(texts[0]["text"], add_special_tokens=False).ids[: len(joined)]
