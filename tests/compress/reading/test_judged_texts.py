"""Queries, documents and judgements in the layout of BEIR: how they are read, divided, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytrec_eval import RelevanceEvaluator

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from foundation.labels import relevance
from tests import tiny_collection, tiny_embedding
from tests.problems import raises_problem

TASK = "retrieval"
QUERIES, DOCUMENTS = {"q1": "lift of wings", "2": "heat"}, {"d1": "a wing", "d2": "a flame. It is hot.", "d3": ""}
QRELS = {("q1", "d1"): 3, ("q1", "d2"): 0, ("2", "d2"): 1}


def loaded(folder: Path, **given: Any) -> tuple[Data, list[str]]:
    told: list[str] = []
    return load_data(DataConfig(path=str(folder), **given), TASK, None, told.append), told


def judged_of(data: Data, split: str) -> dict[tuple[Any, Any], int]:
    """Returns the grades of a split by the texts of query and document."""
    rows, labels = getattr(data, split).rows, getattr(data, split).labels
    found = labels.known
    return {
        (rows[query], rows[found.documents[place]]): grade
        for query, grades in zip(found.queries, found.grades, strict=True)
        for place, grade in grades.items()
    }


def test_evaluation_has_the_judged_queries_and_all_documents(tmp_path: Path) -> None:
    folder = tiny_collection.write(tmp_path / "data", {**QUERIES, "q3": "never judged"}, DOCUMENTS, test=QRELS)
    tiny_collection.lines(
        folder / "corpus.jsonl",
        [
            {"_id": "d1", "title": "Wings", "text": "a wing"},
            {"_id": "d2", "text": "a flame. It is hot."},
            {"_id": "d3", "title": None, "text": ""},
        ],
    )
    data, _ = loaded(folder)
    assert data.evaluation.rows == ["lift of wings", "heat", "Wings a wing", "a flame. It is hot.", ""]
    assert judged_of(data, "evaluation") == {
        ("lift of wings", "Wings a wing"): 3,
        ("lift of wings", "a flame. It is hot."): 0,
        ("heat", "a flame. It is hot."): 1,
    }


@pytest.mark.parametrize("junk", [-1, -2, -100])
def test_grades_below_0_are_not_relevant_as_trec_eval_counts_them(junk: int, tmp_path: Path) -> None:
    train = {("q1", "d1"): 2, ("q1", "d2"): junk, ("2", "d2"): 1}
    asked = {"q1": "of wings", "2": "heat of", "q3": "of flames"}
    folder = tiny_collection.write(
        tmp_path / "data", asked, DOCUMENTS, train=train, test={("q3", "d2"): 2, ("q3", "d1"): junk, ("q3", "d3"): 1}
    )
    data, _ = loaded(folder)
    assert judged_of(data, "evaluation") == {
        ("of flames", DOCUMENTS["d2"]): 2,
        ("of flames", DOCUMENTS["d1"]): 0,
        ("of flames", DOCUMENTS["d3"]): 1,
    }
    assert all(grade >= 0 for grade in judged_of(data, "selection").values())
    trained = list(zip(data.train.rows[::2], data.train.rows[1::2], strict=True))
    assert ("of wings", DOCUMENTS["d2"]) not in trained
    measures = {"ndcg_cut.10", "recall.100", "recip_rank"}
    for order in itertools.permutations("abc"):
        run = {"q": {name: 3.0 - place for place, name in enumerate(order)}}
        theirs, ours = (RelevanceEvaluator({"q": {"a": 2, "b": grade, "c": 1}}, measures).evaluate(run) for grade in (junk, 0))
        assert theirs == ours


def test_files_may_be_compressed_and_ids_numbers(tmp_path: Path) -> None:
    folder = tiny_collection.write(
        tmp_path / "data", {"1": "heat"}, {"1": "a flame. It is hot.", "2": "a wing. It lifts."}, test={("1", "1"): 1}
    )
    for name in ("corpus.jsonl", "qrels/test.tsv"):
        plain = folder / name
        (folder / f"{name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    tiny_collection.lines(folder / "queries.jsonl", [{"_id": 1, "text": "heat"}])
    data, _ = loaded(folder)
    assert judged_of(data, "evaluation") == {("heat", "a flame. It is hot."): 1}


def test_without_train_judgements_documents_are_read_alone(tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", documents=100)
    data, told = loaded(folder)
    assert len(data.train) == 80
    assert data.train.labels.count() == 0
    assert data.train.together == 1
    documents = set(data.evaluation.rows[40:])
    assert set(data.train.rows) < documents
    assert any("no queries to train on" in line for line in told)
    queries = np.flatnonzero(data.selection.labels.array[:, 0] == relevance.QUERY)
    assert len(queries) == 20  # held out: each is cut into a query and the document to be found
    for (query, document), grade in judged_of(data, "selection").items():
        assert grade == 1
        assert f"{query} {document}" in documents - set(data.train.rows)
    assert not set(data.train.rows) & set(data.evaluation.rows[:40])
    assert len(data.calibration(32)) == 32


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("It flies. Why? Lift.", ("It flies.", "Why? Lift.")),
        ("lift of a wing .", ("lift of", "a wing .")),
        ("is 3.5 enough? no", ("is 3.5 enough?", "no")),
        ("word", None),
        ("", None),
    ],
)
def test_a_document_is_cut_behind_its_first_sentence(text: str, cut: tuple[str, str] | None) -> None:
    from compress.reading.judged_texts import opening

    assert opening(text) == cut


def test_train_judgements_become_pairs_and_dev_the_selection(tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", train=30, dev=10, test=20)
    data, _ = loaded(folder)
    assert data.train.together == 2
    assert len(data.train.labels.parts(2)[0]) == 60  # two relevant documents a query; the third has grade 0
    texts = data.train.labels.array[:, 3]
    assert texts[0] == texts[2] != texts[1]  # the first two pairs have one query
    queries = [json.loads(line)["text"] for line in (folder / "queries.jsonl").read_text().splitlines()]
    corpus = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert data.train.rows[:4] == [queries[0], corpus[0], queries[0], corpus[1]]
    assert {query for query, _ in judged_of(data, "selection")} == set(queries[30:40])
    assert len(data.selection) == 10 + len(corpus)
    assert {query for query, _ in judged_of(data, "evaluation")} == set(queries[40:])


def negatives_of(data: Data) -> dict[tuple[Any, Any], list[Any]]:
    """Returns the negatives of each pair of a query and a document to train on, without fillers."""
    size, rows, parts = data.train.together, data.train.rows, data.train.labels.array[:, 2]
    return {
        (rows[start], rows[start + 1]): [rows[row] for row in range(start + 2, start + size) if parts[row] > 0]
        for start in range(0, len(rows), size)
    }


@pytest.mark.parametrize("count", [1, 2, 5])
def test_negatives_are_candidates_that_nobody_judged_relevant(count: int, tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", train=30, dev=10, test=20)
    data, told = loaded(folder, negatives=count)
    queries = [json.loads(line)["text"] for line in (folder / "queries.jsonl").read_text().splitlines()]
    corpus = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    found = negatives_of(data)
    assert len(found) == 60
    for number in range(30):  # candidates are the documents from -3 to 4 behind that of the query, 0 and 1 are relevant
        wrong = {corpus[(number + step) % 120] for step in (-3, -2, -1, 2, 3, 4)}
        first, second = (found[queries[number], corpus[(number + step) % 120]] for step in (0, 1))
        assert [len(first), len(second)] == [min(count, 3)] * 2  # six candidates for two documents
        assert {*first, *second} <= wrong
        assert not {*first} & {*second}
    assert data.train.together == 2 + min(count, 3)
    assert any(f"60 pairs of query and document to train on, with up to {min(count, 3)} negatives; 0 have fewer" in line for line in told)


def test_a_query_without_candidates_has_a_pair_of_its_own(tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", train=30, dev=10, test=20)
    file = folder / "candidates" / "train.tsv"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if not line.startswith("q3\t")))
    data, told = loaded(folder, negatives=2)
    assert sorted(len(texts) for texts in negatives_of(data).values()) == [0, 0, *[2] * 58]
    assert len(data.train.labels.parts(2)[0]) == 60
    assert any("2 have fewer" in line for line in told)


def test_candidates_change_nothing_where_no_negatives_are_asked_for(tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", train=30, dev=10, test=20)
    with_file = loaded(folder)[0].digest
    (folder / "candidates" / "train.tsv").unlink()
    assert loaded(folder)[0].digest == with_file


@pytest.mark.parametrize(
    ("train", "change", "line"),
    [
        (30, lambda file: file.unlink(), r"data\.negatives: 2 given; .*train\.tsv says which documents a first search found: add it"),
        (30, lambda file: file.write_text("query-id\tcorpus-id\tscore\nq0\tnone\t1\n"), r"train\.tsv line 2: corpus-id 'none' is no _id"),
        (0, lambda file: None, r"data\.negatives: 2 given; .* has no queries to train on: add qrels/train\.tsv, or leave it out"),
    ],
)
def test_negatives_that_are_not_there_are_refused_in_one_line(train: int, change: Any, line: str, tmp_path: Path) -> None:
    folder = tiny_collection.folder(tmp_path / "data", train=train, dev=10 if train else 0, test=20)
    change(folder / "candidates" / "train.tsv")
    with pytest.raises(InputError, match=line) as caught:
        loaded(folder, negatives=2)
    assert len(caught.value.lines) == 1
    with raises_problem("data.negatives", "2", "reranking", "sentence-embedding", "leave it out"):
        load_data(DataConfig(path=str(folder), negatives=2), "reranking", None, print)


def test_without_dev_a_part_of_the_train_queries_is_the_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.reading.judged_texts.OTHER_DOCUMENTS", 5)
    data, told = loaded(tiny_collection.folder(tmp_path / "data", train=30, test=20))
    selected, trained = ({query for query, _ in judged_of(data, "selection")}, set(data.train.rows[::2]))
    assert len(selected) == 6
    assert len(trained) == 24
    assert not selected & trained
    assert len(data.selection) <= 6 + 18 + 5
    assert any("6 train queries, chosen by content hash" in line for line in told)


def test_a_query_of_the_evaluation_is_never_trained_on(tmp_path: Path) -> None:
    queries = {f"q{number}": f"query {number // 2}" for number in range(20)}  # each text twice
    documents = {f"d{number}": f"document {number}. It is long." for number in range(20)}
    everything = {(f"q{number}", f"d{number}"): 1 for number in range(20)}
    test = dict.fromkeys(list(everything)[:5], 1)
    dev = dict.fromkeys(list(everything)[5:8], 1)
    data, _ = loaded(tiny_collection.write(tmp_path / "data", queries, documents, train=everything, dev=dev, test=test))
    assert {query for query, _ in judged_of(data, "evaluation")} == {"query 0", "query 1", "query 2"}
    assert {query for query, _ in judged_of(data, "selection")} == {"query 3"}
    assert set(data.train.rows[::2]) == {f"query {number}" for number in range(4, 10)}


def test_prompts_stand_before_queries_and_documents(tmp_path: Path) -> None:
    folder = tiny_collection.write(tmp_path / "data", QUERIES, DOCUMENTS, test=QRELS)
    data, _ = loaded(folder, prompts={"query": "query: ", "document": "passage: "})
    assert data.evaluation.rows == ["query: lift of wings", "query: heat", "passage: a wing", "passage: a flame. It is hot.", "passage: "]


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("queries.jsonl", '{"_id": "q1"}\n', "queries.jsonl line 1: no column 'text'; available: '_id'"),
        ("queries.jsonl", '{"_id": "q1", "text": 3}\n', "queries.jsonl line 1: 3 given as text"),
        ("queries.jsonl", '{"_id": null, "text": "a"}\n', "queries.jsonl line 1: _id None given; a text or a number is allowed"),
        ("queries.jsonl", '{"_id": "1", "text": "a"}\n{"_id": 1, "text": "b"}\n', "queries.jsonl line 2: _id '1' occurs again"),
        ("queries.jsonl", "[]\n", "queries.jsonl line 1: a JSON list; an object"),
        ("corpus.jsonl", "", "corpus.jsonl: empty file"),
        ("corpus.jsonl", '{"_id": "d1", "title": 3, "text": "a"}\n', "corpus.jsonl line 1: 3 given as text"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td9\t1\n", "test.tsv line 2: corpus-id 'd9' is no _id of corpus.jsonl"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq9\td1\t1\n", "test.tsv line 2: query-id 'q9' is no _id of queries.jsonl"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\tyes\n", "test.tsv line 2: score 'yes' given; an integer up to 1000"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t1001\n", "test.tsv line 2: score '1001' given; an integer up to 1000"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\n", "test.tsv line 2: 2 tab-separated fields; 3, as in the header"),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t2\n",
            "test.tsv line 3: query 'q1' and document 'd1' are judged again",
        ),
        ("qrels/test.tsv", "q1\td1\t1\n", "test.tsv: no column 'query-id'; available: 'q1'"),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq1\td1\t0\n",
            r"test.tsv: no document is relevant \(score 1 or more\) to any query",
        ),
    ],
)
def test_a_wrong_row_is_refused_in_one_line(file: str, text: str, line: str, tmp_path: Path) -> None:
    folder = tiny_collection.write(tmp_path / "data", QUERIES, DOCUMENTS, test=QRELS)
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=line) as caught:
        loaded(folder)
    assert len(str(caught.value).splitlines()) in (1, 3)  # three columns are missing at once


def test_what_is_missing_or_has_no_use_is_said(tmp_path: Path) -> None:
    folder = tiny_collection.write(tmp_path / "data", QUERIES, DOCUMENTS, train=QRELS)
    with pytest.raises(InputError, match=r"qrels: no test\.tsv and no dev\.tsv; judgements are needed"):
        loaded(folder)
    with raises_problem("data.columns", "retrieval", "BEIR", "leave it out"):
        loaded(folder, columns={"text": "body"})
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(InputError, match=r"corpus\.jsonl: no such file, and no corpus\.jsonl\.gz"):
        loaded(folder)
    with pytest.raises(InputError, match=r"corpus\.jsonl, queries\.jsonl and qrels/test\.tsv: give one"):
        loaded(tmp_path / "absent")
    with raises_problem("data.prompts", "text-regression", "image-text, retrieval or reranking"):
        load_data(DataConfig(path=str(folder), prompts={"query": "q"}), "text-regression", None, print)  # type: ignore[arg-type]


def test_prompts_of_the_model_count_where_the_recipe_gives_none(tmp_path: Path) -> None:
    documents = DOCUMENTS | {f"more{number}": f"Heat of slab {number}. And more." for number in range(40)}
    folder = tiny_collection.write(tmp_path / "data", QUERIES, documents, test=QRELS)
    model, told = tiny_embedding.folder(tmp_path / "model"), list[str]()
    prompts = {"query": "Query: ", "document": "Passage: "}
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))

    def texts(**given: Any) -> list[Any]:
        told.clear()
        return list(load_data(DataConfig(path=str(folder), **given), TASK, None, told.append, str(model)).evaluation.rows)

    assert texts()[:2] == ["Query: lift of wings", "Query: heat"]
    assert texts()[2] == "Passage: a wing"
    assert any("'Query: ' before queries and 'Passage: ' before documents" in line for line in told)
    assert texts(prompts={"query": "q: "})[:3] == ["q: lift of wings", "q: heat", "a wing"]
    assert texts(prompts={})[0] == "lift of wings"  # none, and that was asked for
    assert not any("stands before" in line for line in told)
