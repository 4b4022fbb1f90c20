"""Rows that results are reported of are in no other split, and texts that belong together are in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, input_key, trained_on
from foundation.labels.classes import ClassIds
from foundation.standalone.preprocess import TokenPair
from foundation.standalone.windows import Window
from tests import questions

ROWS = st.lists(st.sampled_from([f"text {number}" for number in range(30)]), min_size=12, max_size=40)


def split(rows: list[Any], documents: list[int] | None = None) -> Split:
    return Split(rows, ClassIds(np.arange(len(rows)) % 2), None if documents is None else np.array(documents))


def divided(train: Split, test: Split, validation: Split | None = None, **settings: Any) -> tuple[Data, list[str]]:
    lines: list[str] = []
    return divide(train, test, validation, ("a", "b"), "here", lines.append, **settings), lines


@given(ROWS, ROWS)
def test_no_row_is_in_two_splits_whatever_its_label(train: list[str], test: list[str]) -> None:
    new = [f"new {number}" for number in range(5)]
    data, lines = divided(split([*train, *new]), split(test))
    parts = [set(part.rows) for part in (data.train, data.selection, data.evaluation)]
    assert not (parts[0] & parts[1])
    assert not (parts[0] & parts[2])
    assert not (parts[1] & parts[2])
    assert not set(data.calibration().rows) & parts[2]
    count = sum(row in set(test) for row in train)
    assert (data.shared.left_out, data.shared.in_train) == (count, 0)
    assert any(line.startswith(f"data: {count} train rows that are also in evaluation") for line in lines) == bool(count)
    assert trained_on(data) is None


def test_a_key_keeps_them_and_counts_the_evaluation_rows() -> None:
    train, test = split(["a", "a", "b", *(f"row {number}" for number in range(20))]), split(["a", "b", "c"])
    data, _ = divided(train, test, keep=True)
    assert data.train.rows.count("a") == 2
    assert not set(data.selection.rows) & {"a", "b"}
    assert (data.shared.left_out, data.shared.in_train) == (0, 2)
    warning = trained_on(data)
    assert warning is not None
    assert "2 of 3 evaluation rows are trained on" in warning
    assert "data.keep_evaluation_rows" in warning


def test_all_rows_in_evaluation_is_one_clear_line() -> None:
    rows = [f"row {number}" for number in range(8)]
    with pytest.raises(InputError) as error:
        divided(split(rows), split(rows))
    [line] = error.value.lines
    assert "all 8 train rows are evaluation rows too" in line
    assert "data.keep_evaluation_rows: true" in line
    selection = [f"other {number}" for number in range(4)]
    assert divided(split(rows), split(rows), split(selection), keep=True)[0].shared.in_train == 8


def test_a_source_is_the_same_row_with_another_target() -> None:
    one, other = (TokenPair(np.array([1, 2], np.int32), np.array([target], np.int32)) for target in (3, 4))
    assert input_key(one) == input_key(other)
    assert input_key(("a", "b")) != input_key(("ab", ""))


def test_spaces_make_no_other_row() -> None:
    assert input_key("a joy . ") == input_key(" a  joy .")
    assert input_key(("a ", "b")) == input_key(("a", " b"))
    assert input_key(("a b", "")) != input_key(("a", "b"))
    assert input_key("ab") != input_key("a b")
    data, _ = divided(split(["row 1 ", "row  2", "row 3", *(f"other {number}" for number in range(8))]), split(["row 1", "row 2"]))
    assert data.shared.left_out == 2


def test_selection_takes_whole_documents_unless_they_are_too_large() -> None:
    rows = [f"row {number}" for number in range(400)]
    documents = [number // 4 for number in range(400)]
    data, _ = divided(split(rows, documents), split(["x", "y"]))
    assert data.train.documents is not None
    assert data.selection.documents is not None
    assert not set(data.train.documents) & set(data.selection.documents)
    assert 40 <= len(data.selection) <= 80
    order = np.random.default_rng(0).permutation(400)
    again, _ = divided(split([rows[place] for place in order], [documents[place] for place in order]), split(["x", "y"]))
    assert set(again.selection.rows) == set(data.selection.rows)
    data, lines = divided(split(rows, [0] * 200 + [1] * 200), split(["x", "y"]))
    assert 40 <= len(data.selection) <= 80
    assert any("rows of one document are in train and in selection" in line for line in lines)


def test_questions_of_selection_have_contexts_of_their_own(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    told = [questions.asked(random) for _ in range(120)]
    asked = [{**row, "question": text} for row in told[:100] for text in (row["question"], "what is in oslo ?", "who is ann ?")]
    for name, rows in (("train", asked), ("test", told[100:])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    config = DataConfig(path=str(tmp_path), max_length=48, stride=12)
    data = load_data(config, "question-answering", None, lambda line: None, str(questions.checkpoint()))
    contexts = [{row.context for row in part.rows if isinstance(row, Window)} for part in (data.train, data.selection)]
    assert contexts[0]
    assert contexts[1]
    assert not contexts[0] & contexts[1]


def test_searches_take_no_such_key(tmp_path: Path) -> None:
    config = DataConfig(path=str(tmp_path), keep_evaluation_rows=True)
    with pytest.raises(InputError, match="keep_evaluation_rows: true given for retrieval"):
        load_data(config, "retrieval", None, lambda line: None, "x")
