"""Questions with answers: files of SQuAD, tables, splits by question, and one-line errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.load import load_data
from compress.reading.squad import question_of
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, content_key
from foundation.labels import spans
from foundation.measure.engine_process import read_rows, write_rows
from foundation.standalone.windows import Window
from tests import questions
from tests.problems import raises_problem

TASK = "question-answering"


def load(folder: Path, **settings: Any) -> tuple[Data, list[str]]:
    lines: list[str] = []
    config = DataConfig(path=str(folder), **{"max_length": 48, "stride": 12, **settings})
    return load_data(config, TASK, None, lines.append, str(questions.checkpoint())), lines


def squad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows in the form of SQuAD, one paragraph each."""
    asked = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "answers": [
                        {"text": text, "answer_start": start}
                        for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                    ],
                }
            ],
        }
        for row in rows
    ]
    return {"version": "x", "data": [{"title": "a", "paragraphs": asked[::2]}, {"title": "b", "paragraphs": asked[1::2]}]}


def texts(split: Split) -> set[tuple[str, str]]:
    return {(row.question, row.context) for row in split.rows if isinstance(row, Window)}


def test_files_of_squad_and_tables_hold_the_same_questions(tmp_path: Path) -> None:
    rows = questions.rows(300, unanswerable=0.2)
    for name, ending, written in (("a", "json", squad(rows[:240])), ("b", "json", rows[:240])):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"train.{ending}").write_text(json.dumps(written))
        with gzip.open(tmp_path / name / "dev.json.gz", "wt") as file:
            json.dump(squad(rows[240:]), file)
    (one, lines), (other, _) = load(tmp_path / "a"), load(tmp_path / "b")
    assert one.labels == other.labels == ("start", "end", spans.NO_ANSWER)
    for name in ("train", "selection", "evaluation"):
        assert texts(getattr(one, name)) == texts(getattr(other, name))
    assert texts(one.evaluation) == {(row["question"], row["context"]) for row in rows[240:]}
    assert one.evaluation.labels.count() == 60
    none = sum(not row["answers"]["text"] for row in rows[240:])
    assert any(f"evaluation: 60 questions, {len(one.evaluation)} windows, {none} questions without an answer" in line for line in lines)
    assert len(one.evaluation) > 60  # some contexts need several windows


def test_labels_hold_the_answer_of_each_window(tmp_path: Path) -> None:
    data, _ = load(questions.write(tmp_path, {"train": 60, "test": 40}, unanswerable=0.2))
    rows = {(row["question"], row["context"]): row for row in map(json.loads, (tmp_path / "test.jsonl").read_text().splitlines())}
    engine, held = questions.tokenizer(), 0
    for window, labels in zip(data.evaluation.rows, data.evaluation.labels.array, strict=True):
        assert isinstance(window, Window)
        row = rows[window.question, window.context]
        (ids,) = Window.tokens([window], engine)
        first, last = labels[0, 0].tolist()
        if last:
            assert engine.decode(ids[0, first : last + 1].tolist()) == row["answers"]["text"][0]
            held += 1
        assert spans.true_words(labels) == ([spans.codes_of(text) for text in row["answers"]["text"]] or [()])
        assert labels[0, 1, 1] == bool(row["answers"]["text"])
    assert held >= 25
    assert data.train.labels.array.shape[1:] == (1, spans.HEADER, 2)  # no texts where only positions are learned


def test_windows_of_a_question_are_in_one_split(tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(json.dumps(squad(questions.rows(400))))
    data, lines = load(tmp_path / "all.json")
    parts = [texts(split) for split in (data.train, data.selection, data.evaluation)]
    assert not parts[0] & parts[1]
    contexts = [{context for _, context in part} for part in parts]
    assert not contexts[2] & (contexts[0] | contexts[1])  # the test split has contexts of its own
    assert any("of contexts chosen by content hash, become the test split" in line for line in lines)
    assert data.labels == ("start", "end")


def test_rows_are_written_and_read_again(tmp_path: Path) -> None:
    rows = [Window("wh\u00e4t ?", "it rained .", 0, 3), Window("what ?", "it rained .", 1, 2)]
    write_rows(tmp_path / "rows.safetensors", rows, {"x": np.zeros(1)})
    assert read_rows(tmp_path / "rows.safetensors") == rows
    keys = {content_key(row) for row in (*rows, Window("what ?", "it rained .", 1, 3), ("what ?", "it rained ."))}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        (
            ("q", "a b", {"text": ["b"], "answer_start": [1]}),
            r"x: the answer 'b' is not in the context at character 1, where ' ' stands; correct it",
        ),
        (("q", "a b", {"text": ["b"], "answer_start": [-1]}), "x: 'b' at -1 given as an answer"),
        (("q", "a b", {"text": ["b"], "answer_start": ["2"]}), "x: 'b' at '2' given as an answer"),
        (("q", "a b", {"text": [""], "answer_start": [0]}), "x: '' at 0 given as an answer"),
        (("q", "a b", {"text": ["b"], "answer_start": []}), r"given as answers; a map .* is allowed"),
        (("q", "a b", "b"), "x: 'b' given as answers"),
        (("q", "a b", [{"text": "b"}]), "x: 'b' at None given as an answer"),
        ((" ", "a b", []), "x: ' ' given as question; Unicode text with words is allowed"),
        (("q", None, []), "x: None given as context"),
        (("q", "\ud800", []), "given as context"),
    ],
)
def test_what_is_no_question_is_said_in_one_line(cells: Any, line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        question_of(cells, "x")
    assert len(caught.value.lines) == 1


def test_lists_of_answers_and_leading_spaces_are_read() -> None:
    assert question_of(("  what ?", "a b", [{"text": "b", "answer_start": 2}]), "x") == (("what ?", "a b"), (("b", 2),))
    assert question_of(("q", "a b", {"text": [], "answer_start": []}), "x")[1] == ()


@pytest.mark.parametrize(
    ("whole", "line"),
    [
        ({"rows": []}, r"train.json: no list 'data'; JSON in the form of SQuAD"),
        ({"data": [{"title": "x"}]}, "an article: no list 'paragraphs'"),
        ({"data": [{"paragraphs": [{"context": "a"}]}]}, "the paragraph behind question 0: no list 'qas'"),
        ({"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "q"}]}]}]}, "train.json question 1: no 'answers'"),
        ([{"question": "q", "context": "a"}], "no column 'answers'"),
    ],
)
def test_files_of_another_form_are_refused_in_one_line(whole: Any, line: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps(whole))
    with pytest.raises(InputError, match=line):
        load(tmp_path)


def test_a_question_that_leaves_no_room_is_named(tmp_path: Path) -> None:
    rows = questions.rows(30)
    rows[3]["question"] = "what " * 40
    (tmp_path / "all.json").write_text(json.dumps(rows))
    with raises_problem("all.json question 4", "43 of the 48 tokens"):
        load(tmp_path / "all.json")


def test_stride_is_for_this_task_alone() -> None:
    with raises_problem("data.stride", "8", "text-classification", TASK, "leave it out"):
        load_data(DataConfig(path="x", stride=8), "text-classification", None, print)
    assert DataConfig(path="x", max_length=384).shared_tokens == 128
