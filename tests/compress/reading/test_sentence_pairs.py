"""Pairs of sentences become texts with labels that say which belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import Columns, DataConfig
from foundation.data.splits import Data
from tests.problems import raises_problem

TASK = "sentence-embedding"


def loaded(folder: Path, train: str, test: str, **columns: Any) -> tuple[Data, list[str]]:
    (folder / "train.csv").write_text("text,text_pair,label\n" + train)
    (folder / "test.csv").write_text("text,text_pair,label\n" + test)
    lines: list[str] = []
    return load_data(DataConfig(path=str(folder), columns=Columns(**columns)), TASK, None, lines.append), lines


def test_a_row_is_a_text_and_scores_are_scaled_by_those_of_train(tmp_path: Path) -> None:
    train = "".join(f"a{number},b{number},{1 + number % 5}\n" for number in range(50))
    data, lines = loaded(tmp_path, train, "c,d,2\ne,f,7\n")
    assert data.evaluation.rows == ["c", "d", "e", "f"]
    assert data.evaluation.labels.array.tolist() == [[0, 0.25], [0, 0.25], [1, 1.5], [1, 1.5]]
    assert len(data.train) + len(data.selection) == 100
    assert {f"{one}{other}" for one, other in zip(data.train.rows[::2], data.train.rows[1::2], strict=True)} <= {
        f"a{number}b{number}" for number in range(50)
    }
    assert data.train.together == data.selection.together == 2
    assert any("scores 1 to 5 are scaled to 0 to 1" in line for line in lines)
    assert data.labels == ("score",)


def test_calibration_takes_both_texts_of_a_pair(tmp_path: Path) -> None:
    train = "".join(f"a{number},b{number},{number % 5}\n" for number in range(50))
    data, _ = loaded(tmp_path, train, "c,d,2\n")
    chosen = data.calibration(16)
    assert len(chosen) == 16
    assert chosen.together == 2
    assert all(str(one)[1:] == str(other)[1:] for one, other in zip(chosen.rows[::2], chosen.rows[1::2], strict=True))
    assert np.array_equal(chosen.labels.array, data.calibration(16).labels.array)


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ("a,b,3\nc,d,3\n" * 30, "all train pairs have the score 3"),
        ("a,b,much\n", "label 'much'; a finite number is allowed"),
        ("a,b\n", "train.csv.* line 2"),
    ],
)
def test_malformed_rows_are_refused_in_one_line(train: str, line: str, tmp_path: Path) -> None:
    rows = "".join(f"x{number},y{number},3\n" for number in range(30))
    with pytest.raises(InputError, match=line) as caught:
        loaded(tmp_path, train + rows, "c,d,2\n")
    assert len(caught.value.lines) == 1
    assert "\n" not in str(caught.value)


def test_data_without_a_second_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,1\n")
    with pytest.raises(InputError, match="text_pair"):
        load_data(DataConfig(path=str(tmp_path)), TASK, None, print)


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Writes a table in the format of the ending of its name."""
    ending = name.rpartition(".")[2]
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    elif ending == "jsonl":
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "json":
        (folder / name).write_text(json.dumps(rows))
    else:
        mark = "," if ending == "csv" else "\t"
        (folder / name).write_text("\n".join(mark.join(map(str, row)) for row in [list(rows[0]), *(row.values() for row in rows)]) + "\n")


def triplets(count: int) -> list[dict[str, Any]]:
    return [{"anchor": f"a{n}", "positive": f"p{n % 7}", "negative": f"n{n}"} for n in range(count)]


def scored(folder: Path, **more: Any) -> dict[str, Any]:
    """Writes test and validation with scores, and returns `data.files` without train."""
    for name, start in (("test", 0), ("validation", 30)):
        write(folder, f"{name}.csv", [{"one": f"{name} x{n}", "two": f"y{n}", "score": n % 5} for n in range(start, start + 30)])
    columns = {"text": "one", "text_pair": "two", "label": "score", **more}
    return {name: {"file": f"{name}.csv", "columns": columns} for name in ("test", "validation")}


def read(folder: Path, train: str, columns: dict[str, Any], task: str = TASK, **files: Any) -> Data:
    given = {"train": {"file": train, "columns": columns}, **(files or scored(folder))}
    return load_data(DataConfig.model_validate({"path": str(folder), "files": given}), task, None, print)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_a_file_without_a_column_of_scores_holds_pairs_without_them(ending: str, tmp_path: Path) -> None:
    write(tmp_path, f"train.{ending}", triplets(40))
    data = read(tmp_path, f"train.{ending}", {"text": "anchor", "text_pair": "positive"})
    assert data.train.rows == [text for row in triplets(40) for text in (row["anchor"], row["positive"])]
    assert data.train.together == 2
    assert data.train.labels.array[:, 1].tolist() == [number for number in range(40) for _ in range(2)]
    assert data.train.labels.array[1, 3] == data.train.labels.array[15, 3]  # p0 occurs in every seventh pair
    assert data.evaluation.rows[:2] == ["test x0", "y0"]
    assert data.evaluation.labels.array[:4].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]  # as they are given
    assert data.selection.rows[:2] == ["validation x30", "y30"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_a_column_of_negatives_makes_triplets(ending: str, tmp_path: Path) -> None:
    write(tmp_path, f"train.{ending}", triplets(40))
    data = read(tmp_path, f"train.{ending}", {"text": "anchor", "text_pair": "positive", "negative": "negative"})
    assert data.train.rows == [text for row in triplets(40) for text in row.values()]
    assert data.train.together == 3
    assert data.calibration(10).rows[:3] in [list(row.values()) for row in triplets(40)]
    assert len(data.calibration(10)) == 9


def mined(count: int) -> list[dict[str, Any]]:
    """Rows of one to four negatives, the first of them twice."""
    return [
        {"anchor": f"a{n}", "positive": f"p{n}", "negatives": [f"n{n}", *(f"n{n}-{k}" for k in range(n % 4)), f"n{n}"]}
        for n in range(count)
    ]


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_a_column_may_hold_lists_of_negatives(ending: str, tmp_path: Path) -> None:
    write(tmp_path, f"train.{ending}", mined(40))
    data = read(tmp_path, f"train.{ending}", {"text": "anchor", "text_pair": "positive", "negative": "negatives"})
    assert data.train.together == 6
    groups = [data.train.rows[start : start + 6] for start in range(0, 240, 6)]
    assert groups[0] == ["a0", "p0", "n0", "n0", "n0", "n0"]
    assert groups[3] == ["a3", "p3", "n3", "n3-0", "n3-1", "n3-2"]
    assert data.train.labels.array[:6, 2].tolist() == [0, 1, 2, -3, -4, -5]
    assert data.train.labels.array[18:24, 2].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(data.calibration(20)) == 18


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_several_columns_of_negatives_leave_out_empty_cells(ending: str, tmp_path: Path) -> None:
    rows = [{"anchor": f"a{n}", "positive": f"p{n}", "one": "" if n == 1 else f"n{n}", "two": f"m{n}", "three": ""} for n in range(30)]
    write(tmp_path, f"train.{ending}", rows)
    data = read(tmp_path, f"train.{ending}", {"text": "anchor", "text_pair": "positive", "negative": ["one", "two", "three"]})
    assert data.train.together == 4
    assert data.train.rows[:8] == ["a0", "p0", "n0", "m0", "a1", "p1", "m1", "m1"]
    assert data.train.labels.array[:8, 2].tolist() == [0, 1, 2, 3, 0, 1, 2, -3]


def test_rows_with_fewer_negatives_are_told(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", mined(40))
    given = {"train": {"file": "train.jsonl", "columns": {**PAIR, "negative": "negatives"}}, **scored(tmp_path)}
    lines: list[str] = []
    load_data(DataConfig.model_validate({"path": str(tmp_path), "files": given}), TASK, None, lines.append)
    assert any("triplets with up to 4 negatives; 30 of 40 have fewer, and take the time of as many texts" in line for line in lines)


def test_the_first_negatives_of_each_row_are_taken(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", mined(40))
    given = {"train": {"file": "train.jsonl", "columns": {**PAIR, "negative": "negatives"}}, **scored(tmp_path)}
    data = load_data(DataConfig.model_validate({"path": str(tmp_path), "negatives": 2, "files": given}), TASK, None, print)
    assert data.train.together == 4
    assert data.train.rows[:16] == ["a0", "p0", "n0", "n0", "a1", "p1", "n1", "n1-0", "a2", "p2", "n2", "n2-0", "a3", "p3", "n3", "n3-0"]
    assert data.train.labels.array[:16, 2].tolist() == [0, 1, 2, -3, *[0, 1, 2, 3] * 3]


def with_margins(count: int, ending: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows with margins, and the columns of train: of tables one negative, of JSON one to four."""
    if ending in ("csv", "tsv"):
        return [{**row, "margin": n / 8} for n, row in enumerate(triplets(count))], {**PAIR, "negative": "negative", "margin": "margin"}
    rows = [{**row, "margin": [n / 8 + k for k, _ in enumerate(row["negatives"])]} for n, row in enumerate(mined(count))]
    return rows, {**PAIR, "negative": "negatives", "margin": "margin"}


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_margins_stand_at_their_negatives(ending: str, tmp_path: Path) -> None:
    rows, columns = with_margins(40, ending)
    write(tmp_path, f"train.{ending}", rows)
    labels = read(tmp_path, f"train.{ending}", columns).train.labels.array
    assert labels.shape[1] == 5
    if ending in ("csv", "tsv"):
        assert labels[:, 4].reshape(-1, 3).tolist() == [[0, 0, n / 8] for n in range(40)]
        return
    assert labels[:12, 4].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0.125, 1.125, 0, 0]  # the last negative equals the first
    assert labels[18:24, 4].tolist() == [0, 0, 0.375, 1.375, 2.375, 3.375]


def test_rows_that_judge_need_no_margins(tmp_path: Path) -> None:
    rows, columns = with_margins(60, "csv")
    write(tmp_path, "train.csv", rows)
    write(tmp_path, "test.csv", triplets(10))
    given = {"path": str(tmp_path), "columns": columns}
    data = load_data(DataConfig.model_validate(given), "sentence-triplets", None, print)
    assert [split.labels.array.shape[1] for split in (data.train, data.selection, data.evaluation)] == [5, 4, 4]
    place = {text: n / 8 for n, text in enumerate(row["anchor"] for row in rows)}
    assert data.train.labels.array[2::3, 4].tolist() == [place[str(text)] for text in data.train.rows[::3]]


@pytest.mark.parametrize(
    ("row", "columns", "line"),
    [
        ({"n": "x", "m": "much"}, {"negative": "n", "margin": "m"}, r"line 1: margin 'much' given; a finite number is allowed"),
        ({"n": "x", "m": True}, {"negative": "n", "margin": "m"}, r"line 1: margin True given; a finite number is allowed"),
        ({"n": "x", "m": None}, {"negative": "n", "margin": "m"}, r"line 1: margin None given; a finite number is allowed"),
        ({"n": ["x", "y"], "m": [1]}, {"negative": "n", "margin": "m"}, r"line 1: 1 margin\(s\) given for 2 negative\(s\); one for each"),
        ({"m": 1}, {"margin": "m"}, r"data\.columns\.margin: 'm' given without data\.columns\.negative"),
        ({"n": "x"}, {"negative": "n", "margin": "m"}, r"train\.jsonl line 1: no column 'm'; available"),
    ],
)
def test_margins_that_are_none_are_refused_in_one_line(row: dict[str, Any], columns: dict[str, Any], line: str, tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", [{"anchor": "a", "positive": "p", **row}])
    with pytest.raises(InputError, match=line) as caught:
        read(tmp_path, "train.jsonl", {**PAIR, **columns})
    assert len(caught.value.lines) == 1


def test_files_of_train_have_margins_or_none(tmp_path: Path) -> None:
    rows, columns = with_margins(20, "csv")
    write(tmp_path, "one.csv", rows)
    write(tmp_path, "two.csv", triplets(20))
    train = [{"file": "one.csv", "columns": columns}, {"file": "two.csv", "columns": {**PAIR, "negative": "negative"}}]
    with raises_problem("one.csv", "margins", "two.csv has none", "same columns"):
        load_data(DataConfig.model_validate({"path": str(tmp_path), "files": {"train": train, **scored(tmp_path)}}), TASK, None, print)


def test_a_column_is_named_once() -> None:
    with pytest.raises(ValueError, match=r"negative: \['a', 'a'\] given; .*: leave out the others"):
        Columns(negative=("a", "a"))


def test_a_file_without_a_header_is_read_by_positions(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("".join(f"a{n}\tp{n}\tn{n}\n" for n in range(20)))
    for negative, together in (({}, 2), ({"negative": 2}, 3), ({"negative": [2, 0]}, 4)):
        columns = {"text": 0, "text_pair": 1, **negative}
        given = {"train": {"file": "train.tsv", "header": False, "columns": columns}, **scored(tmp_path)}
        data = load_data(DataConfig.model_validate({"path": str(tmp_path), "files": given}), TASK, None, print)
        assert data.train.together == together


def test_a_negative_of_a_file_replaces_the_label_of_all() -> None:
    base = Columns(text="one", text_pair="two", label="score")
    assert Columns(text="anchor", negative="other").over(base).wanted(TASK) == ("anchor", "two", "other")
    mined = Columns(text="one", text_pair="two", negative="other", margin="margin")
    assert mined.wanted(TASK) == ("one", "two", "other", "margin")
    assert base.over(mined) == base
    assert Columns(negative=("other", 7)).over(base).wanted(TASK) == ("one", "two", "other", 7)
    assert base.over(Columns(negative="other")).wanted(TASK) == ("one", "two", "score")
    assert base.wanted(TASK) == ("one", "two", "score")
    with pytest.raises(ValueError, match=r"label 'score' and negative 'other' .*: leave one of them out"):
        Columns(label="score", negative="other")


def test_a_pair_of_the_selection_is_not_trained_on_without_its_score(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", [*triplets(20), {"anchor": "validation x30", "positive": "y30", "negative": "z"}])
    data = read(tmp_path, "train.csv", {"text": "anchor", "text_pair": "positive", "negative": "negative"})
    assert len(data.train) == 60
    assert "validation x30" not in data.train.rows


PAIR = {"text": "anchor", "text_pair": "positive"}


@pytest.mark.parametrize(
    ("columns", "rows", "files", "line"),
    [
        (
            PAIR,
            [],
            {},
            "pairs without scores to train on, which judge no model; test and validation splits of pairs with scores are needed",
        ),
        (PAIR, [], {"test": "test.csv"}, "test and validation splits of pairs with scores are needed: name both in data.files"),
        ({**PAIR, "label": "grade"}, [], None, "train.csv: no column 'grade'; available: 'anchor', 'positive', 'negative'"),
        ({**PAIR, "negative": "negativ"}, [], None, "train.csv: no column 'negativ'.*did you mean 'negative'"),
        (
            {**PAIR, "negative": "negative"},
            [{"anchor": "a", "positive": "b", "negative": "b"}] * 2,
            None,
            r"line 42: positive and negative are the same text; remove the row \(and 1 more rows like this\)",
        ),
    ],
)
def test_what_cannot_be_trained_on_or_judged_by_is_refused_in_one_line(
    columns: dict[str, Any], rows: list[dict[str, Any]], files: Any, line: str, tmp_path: Path
) -> None:
    write(tmp_path, "train.csv", [*triplets(40), *rows])
    judged = scored(tmp_path)
    given = judged if files is None else {name: judged[name] for name in files} or {"validation": judged["validation"]}
    with pytest.raises(InputError, match=line) as caught:
        read(tmp_path, "train.csv", columns, **given)
    assert len(caught.value.lines) == 1
    assert "\n" not in str(caught.value)


def test_a_split_holds_one_kind_of_rows_and_that_of_the_task_judges(tmp_path: Path) -> None:
    write(tmp_path, "one.csv", triplets(20))
    train = [{"file": "one.csv", "columns": PAIR}, {"file": "one.csv", "columns": {**PAIR, "negative": "negative"}}]
    given = {"path": str(tmp_path), "files": {"train": train, **scored(tmp_path)}}
    with pytest.raises(InputError, match=r"triplets, .*one\.csv has pairs without scores; all files"):
        load_data(DataConfig.model_validate(given), TASK, None, print)
    with pytest.raises(InputError, match=r"pairs without scores .* needed: set data\.columns\.label of"):
        read(tmp_path, "one.csv", PAIR, test={"file": "one.csv", "columns": PAIR})
    triplet = {**PAIR, "negative": "negative"}
    with pytest.raises(InputError, match=r"triplets given .*, or model\.task to sentence-triplets"):
        read(tmp_path, "one.csv", PAIR, test={"file": "one.csv", "columns": triplet})


@pytest.mark.parametrize("cell", ["1", "null", '["x", null]', '[["x"]]', '{"x": "y"}'])
def test_a_negative_that_is_no_text_is_refused(cell: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"anchor": "a", "positive": "p", "negative": {cell}}}\n')
    with pytest.raises(InputError, match=r"line 1: .* given as text; valid Unicode text is allowed"):
        read(tmp_path, "train.jsonl", {**PAIR, "negative": "negative"})


@pytest.mark.parametrize(("cells", "column"), [('"one": []', "one"), ('"one": "", "two": null', ["one", "two"])])
def test_a_row_without_negatives_is_refused(cells: str, column: Any, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(f'{{"anchor": "a", "positive": "p", {cells}}}\n')
    with raises_problem("line 1", "no negative", "at least one", "add one, or remove the row") as caught:
        read(tmp_path, "train.jsonl", {**PAIR, "negative": column})
    assert len(caught.value.lines) == 1


def test_a_positive_among_several_negatives_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", [*mined(30), {"anchor": "a", "positive": "p", "negatives": ["n", "p"]}])
    with pytest.raises(InputError, match=r"line 31: .* same text; remove the row$"):
        read(tmp_path, "train.jsonl", {**PAIR, "negative": "negatives"})


def test_splits_of_the_hub_may_lack_the_column_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = triplets(30)
    judged = [{"anchor": f"x{n}", "positive": f"y{n}", "label": n % 5} for n in range(30)]
    splits = {"train": rows, "validation": judged[:15], "test": judged[15:]}
    found = datasets.DatasetDict({name: datasets.Dataset.from_list(one) for name, one in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset: found)
    data = load_data(DataConfig(path="some/pairs", columns=Columns(**PAIR)), TASK, None, print)
    assert data.train.rows[:2] == ["a0", "p0"]
    assert data.train.together == 2
    assert data.evaluation.labels.array[:, 1].tolist() == [float(n % 5) for n in range(15, 30) for _ in range(2)]
    alone = datasets.DatasetDict({"train": found["train"], "test": datasets.Dataset.from_list(triplets(5))})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset: alone)
    data = load_data(DataConfig(path="some/triplets", columns=Columns(**PAIR)), "sentence-triplets", None, print)
    assert [split.together for split in (data.train, data.selection, data.evaluation)] == [3, 3, 3]
    assert data.evaluation.rows == [text for row in triplets(5) for text in row.values()]
    wrong = Columns(**PAIR, margin="margin")
    with pytest.raises(InputError, match=r"split train: no column 'margin'; available"):
        load_data(DataConfig(path="some/triplets", columns=wrong), "sentence-triplets", None, print)
    given = datasets.Dataset.from_list([{**row, "margin": 0.5} for row in rows])
    both = datasets.DatasetDict({"train": given, "test": alone["test"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset: both)
    data = load_data(DataConfig(path="some/triplets", columns=wrong), "sentence-triplets", None, print)
    assert set(data.train.labels.array[2::3, 4].tolist()) == {0.5}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset: alone)
    with pytest.raises(InputError, match="split test: pairs without scores given to judge models by"):
        load_data(DataConfig(path="some/pairs", columns=Columns(**PAIR)), TASK, None, print)


def test_train_rows_without_scores_never_become_the_selection(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", triplets(40))
    test = scored(tmp_path)["test"]  # a validation split that is that of test leaves nothing to select by
    with pytest.raises(InputError, match="pairs without scores to train on, which judge no model"):
        read(tmp_path, "train.csv", PAIR, test=test, validation=test)
