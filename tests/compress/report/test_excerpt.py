"""Rows whose answer changed, as texts in the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.report.flips.excerpt import MOST_CHARACTERS, MOST_ROWS, excerpt
from foundation.artifacts.artifact import DamagedArtifact
from tests.compress.report.test_page import make_report
from tests.html_tree import Node, tree
from tests.plain_reports import render


def line(row: int, variant: str = "quantize", to: str = "openvino", **more: Any) -> dict[str, Any]:
    return {"row": row, "variant": variant, "from": "torch", "to": to, "before": "a", "after": "b", "label": "a", "input": "text"} | more


def written(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    file = tmp_path / "flips.jsonl"
    file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))
    return file


def test_every_step_of_the_served_variant_comes_first(tmp_path: Path) -> None:
    lines = [line(row, "prune") for row in range(100)] + [line(row, to="torch") for row in range(40)] + [line(row) for row in range(5)]
    found = excerpt(written(tmp_path, lines), "quantize") or []
    assert len(found) == MOST_ROWS
    assert [(one.variant, one.to) for one in found] == [("quantize", "torch")] * 40 + [("quantize", "openvino")] * 5 + [
        ("prune", "openvino")
    ] * 15
    assert [one.row for one in found[:40]] == list(range(40))
    shared = excerpt(written(tmp_path, [*lines, *(line(row) for row in range(100))]), "quantize") or []
    assert {to: sum(one.to == to for one in shared) for to in ("torch", "openvino")} == {"torch": 30, "openvino": 30}


def test_texts_are_kept_whole_up_to_a_length(tmp_path: Path) -> None:
    texts = ["x" * 5000, "two\u2028lines"]
    (found,) = excerpt(written(tmp_path, [line(0, input=texts)]), None) or []
    assert found.input[1] == texts[1]
    assert len(found.input[0]) <= MOST_CHARACTERS + 4


def test_without_the_file_there_are_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert excerpt(tmp_path / "absent", None) is None
    file = tmp_path / "flips.jsonl"
    for text in ("{", "[]\n", '{"row": 1}\n'):
        file.write_text(text)
        with pytest.raises(DamagedArtifact, match=r"flips.jsonl: damaged"):
            excerpt(file, None)


def table(report: dict[str, Any]) -> list[Node]:
    (found,) = tree(render(report)).all("table", klass="flipped")
    return [row for body in found.all("tbody") for row in body.all("tr")]


def test_the_page_shows_texts_escaped_and_folds_long_ones() -> None:
    long = "word " * 100
    lines = [
        line(7, input='<b>bold</b> & "quoted"'),
        line(8, input=["one", long], before="b", after="a"),
        line(9, label=None, of="B-PER", position=3),
    ]
    first, second, third = table(make_report() | {"flipped_rows": lines})
    assert '<b>bold</b> & "quoted"' in first.text
    assert not list(first.all("b"))
    assert "lost" in first.text
    assert "gained" in second.text
    (folded,) = second.all("details")
    assert long.strip() in folded.text
    assert len(next(folded.all("summary")).text) < 200
    assert "B-PER (place 3)" in third.text
    assert not {"lost", "gained"} & set(third.text.split())
    assert not list(third.all("button", klass="term")), "a step of the run is not a step of a training"
