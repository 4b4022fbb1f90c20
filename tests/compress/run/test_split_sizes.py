"""Rows of each split and how many of them a model does not see whole, written once and taken over."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from compress.run import split_sizes
from compress.run.split_sizes import write_sizes
from foundation.artifacts.chain import DATA
from foundation.standalone.preprocess import Row
from tests.export import sentiment


def test_rows_truncated_rows_and_the_longest_of_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint()}, count=4)
    long = " ".join(["good"] * (context.max_length + 3))
    rows: list[Row] = [*(["it was fine"] * (len(context.data.train) - 2)), long, long]
    train = replace(context.data.train, rows=rows)
    context = replace(context, data=replace(context.data, train=train))
    write_sizes(tmp_path, sentiment.checkpoint(), context)
    document = json.loads((tmp_path / DATA).read_text())
    found = {split["split"]: split for split in document["splits"]}
    assert [(name, found[name]["rows"]) for name in found] == [
        ("train", len(train)),
        ("selection", len(context.data.selection)),
        ("evaluation", len(context.data.evaluation)),
    ]
    specials = found["train"]["longest"] - (context.max_length + 3)
    assert 0 <= specials <= 2
    assert found["train"]["truncated"] == 2
    assert (found["evaluation"]["truncated"] == 0) == (found["evaluation"]["longest"] <= context.max_length)
    monkeypatch.setattr(split_sizes, "sizes", lambda *_: pytest.fail("the data are the same"))
    write_sizes(tmp_path, sentiment.checkpoint(), context)


def test_texts_in_windows_are_not_truncated_and_unseen_rows_are_only_counted(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint()}, count=4)
    judged = replace(context, data=context.data.judged_on("selection")) if len(context.data.selection) else context
    windows = replace(judged, stride=2, aggregate="mean")
    found = {split["split"]: split for split in split_sizes.sizes(windows.preprocessor(sentiment.checkpoint()), windows)}
    assert {split["truncated"] for split in found.values()} == {None}
    if windows.data.hidden is not None:
        assert found["evaluation"] == {"split": "evaluation", "rows": len(windows.data.hidden), "longest": None, "truncated": None}
