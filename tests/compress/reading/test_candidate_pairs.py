"""Candidates of queries as pairs: how they are read, divided, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from foundation.labels import candidates
from tests import tiny_collection
from tests.problems import raises_problem

TASK = "reranking"
HEADER = "query-id\tcorpus-id\tscore\n"
QUERIES = {"q1": "lift", "q2": "heat"}
DOCUMENTS = {f"d{number}": f"document {number} is here. It has a rest {number}." for number in range(12)}
QRELS = {("q1", "d1"): 3, ("q1", "d9"): 1, ("q2", "d2"): 1}


def written(out: Path, rows: str, **qrels: Any) -> Path:
    folder = tiny_collection.write(out, QUERIES, DOCUMENTS, **(qrels or {"test": QRELS}))
    (folder / "candidates").mkdir()
    (folder / "candidates" / "test.tsv").write_text(HEADER + rows)
    return folder


def loaded(folder: Path, **given: Any) -> Data:
    return load_data(DataConfig(path=str(folder), **given), TASK, None, lambda line: None)


def test_the_first_candidates_of_each_judged_query_are_evaluated(tmp_path: Path) -> None:
    rows = "q2\td2\t1\nq1\td5\t0.5\nq1\td1\t-2\nq1\td3\t1e1\nq2\td4\t7\n"
    data = loaded(written(tmp_path / "data", rows), candidates=2)
    texts = [(query, document.split(" is")[0]) for query, document in data.evaluation.rows]
    assert texts == [("lift", "document 3"), ("lift", "document 5"), ("heat", "document 4"), ("heat", "document 2")]
    assert data.evaluation.labels.array[:, :5].tolist() == [[2, 0, 0, 3, 1], [2, 0, 0, 3, 1], [2, 1, 0, 1, 0], [2, 1, 1, 1, 0]]
    assert len(loaded(tmp_path / "data").evaluation) == 5


def test_without_train_judgements_first_sentences_are_paired(tmp_path: Path) -> None:
    data = loaded(written(tmp_path / "data", "q1\td1\t1\nq2\td2\t1\n"))
    assert data.train.runs.tolist() == [8] * 10  # ten documents, two are held out
    assert data.train.labels.array[:, 2:5].tolist() == [[float(place == 0), 1, 0] for _ in range(10) for place in range(8)]
    for (first, rest), value in zip(data.train.rows, data.train.labels.array[:, 2], strict=True):
        assert (first.split()[1] == rest.split()[-1].removesuffix(".")) == (value == 1)
    assert len(set(data.train.rows)) == 80
    assert isinstance(data.selection.labels, candidates.Candidates)
    assert len(data.selection) == 4
    assert [int(np.sum(data.selection.labels.array[2 * query : 2 * query + 2, 2])) for query in range(2)] == [1, 1]
    assert not {first for first, _ in data.selection.rows} & {first for first, _ in data.train.rows}


def test_train_judgements_become_lists_with_what_is_not_relevant(tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", train=20, dev=10, test=20)
    data = loaded(folder)
    assert data.train.runs.tolist() == [7] * 40  # of 8 candidates two are relevant
    assert isinstance(data.train.labels, candidates.Candidates)
    grades = data.train.labels.array[:, 2].tolist()
    assert grades == [float((2, 1)[run % 2] if place == 0 else 0) for run in range(40) for place in range(7)]
    assert data.train.labels.array[:, 1].tolist() == [float(run) for run in range(40) for _ in range(7)]
    assert data.train.labels.array[:, 3:6].tolist() == [[2, 1, 0]] * 280
    assert all(len({query for query, _ in data.train.rows[start : start + 7]}) == 1 for start in range(0, 280, 7))
    assert len(data.selection) == 10 * 8
    assert len(data.evaluation) == 20 * 8
    texts = [{query for query, _ in split.rows} for split in (data.train, data.selection, data.evaluation)]
    assert [len(some) for some in texts] == [20, 10, 20]
    assert not texts[0] & texts[1]
    assert not (texts[0] | texts[1]) & texts[2]


@pytest.mark.parametrize(("rows", "lists"), [(70, 10), (20, 2), (3, 1)])
def test_calibration_takes_whole_lists(rows: int, lists: int, tmp_path: Path) -> None:
    data = loaded(tiny_collection.folder(tmp_path / "data", train=20, dev=10, test=20))
    chosen = data.calibration(rows)
    assert chosen.runs.tolist() == [7] * lists
    assert chosen.labels.array[:, 2].astype(bool).tolist() == [place == 0 for _ in range(lists) for place in range(7)]
    assert chosen.rows != data.calibration(rows, seed=1).rows


def test_no_wrong_document_of_train_was_judged_relevant_or_is_beyond_the_first_candidates(tmp_path: Path) -> None:
    documents = {f"d{number}": f"document {number} is here. It has a rest {number}." for number in range(60)}
    judged = {("q1", f"d{2 * number}"): 1 for number in range(10)} | {("q1", "d3"): 0}
    folder = tiny_collection.write(tmp_path / "data", QUERIES, documents, train=judged, test={("q2", "d2"): 1})
    (folder / "candidates").mkdir()
    for split, query in (("train", "q1"), ("test", "q2")):
        rows = "".join(f"{query}\td{number}\t{-number}\n" for number in range(50))
        (folder / "candidates" / f"{split}.tsv").write_text(HEADER + rows)
    train = loaded(folder, candidates=30).train
    numbers = [int(document.split()[1]) for _, document in train.rows]
    grades = train.labels.array[:, 2]
    wrong = [number for number, value in zip(numbers, grades, strict=True) if value == 0]
    assert [number for number, value in zip(numbers, grades, strict=True) if value] == [2 * number for number in range(10)]
    assert len(wrong) == 70
    assert set(wrong) == {number for number in range(30) if number % 2 or number > 18}  # d3 was judged, as not relevant


def test_a_query_of_the_evaluation_is_in_no_other_split(tmp_path: Path) -> None:
    queries = {f"q{number}": f"query {number // 2}" for number in range(12)}  # each text twice
    everything = {(f"q{number}", f"d{number}"): 1 for number in range(12)}
    splits = {"train": everything, "dev": dict(list(everything.items())[3:7]), "test": dict(list(everything.items())[:3])}
    folder = tiny_collection.write(tmp_path / "data", queries, DOCUMENTS, **splits)
    (folder / "candidates").mkdir()
    for split in splits:
        rows = "".join(f"q{number}\td{place}\t{place}\n" for number in range(12) for place in range(12))
        (folder / "candidates" / f"{split}.tsv").write_text(HEADER + rows)
    data = loaded(folder)
    texts = [{query for query, _ in split.rows} for split in (data.evaluation, data.selection, data.train)]
    assert texts == [{"query 0", "query 1"}, {"query 2", "query 3"}, {"query 4", "query 5"}]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("q1\td1\t1\n", "candidates: 1 of 2 judged queries of test have no candidate, the first of them 'q2'; add lines to test.tsv"),
        ("q1\td99\t1\n", "test.tsv line 2: corpus-id 'd99' is no _id of corpus.jsonl"),
        ("q1\td1\tnan\n", "test.tsv line 2: score 'nan' given; a finite number is allowed"),
        ("q1\td1\tbest\n", "test.tsv line 2: score 'best' given; a finite number is allowed"),
        ("q1\td1\t1\nq1\td1\t2\n", "test.tsv line 3: document 'd1' is a candidate of query 'q1' again"),
    ],
)
def test_wrong_candidates_are_refused_in_one_line(rows: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        loaded(written(tmp_path / "data", rows))
    assert len(caught.value.lines) == 1


def test_missing_candidates_are_said(tmp_path: Path) -> None:
    folder = tiny_collection.write(tmp_path / "data", QUERIES, DOCUMENTS, test=QRELS)
    with raises_problem("candidates", "no test.tsv, and no test.tsv.gz", "reranking"):
        loaded(folder)


def test_the_number_of_candidates_is_for_this_task_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", "q1\td1\t1\nq2\td2\t1\n")
    with raises_problem("data.candidates", "5", "retrieval", "reranking", "leave it out"):
        load_data(DataConfig(path=str(folder), candidates=5), "retrieval", None, print)
