"""A recipe from zeros to an int8 engine, on a tiny BERT: what nothing reads is gone from every later model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.commands.list import catalogue
from compress.commands.plan import describe
from compress.pipeline import run
from compress.recipe import check, dump
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests import without_clocks
from tests.export import sentiment
from tests.prune import small_runs

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

STAGES: list[dict[str, Any]] = [
    {"sparsify": {"method": "magnitude", "pattern": {"block": [65536, 1]}, "sparsity": 0.75, "recover": None}},
    {"compact": {}},
    {"quantize": {"calibration": {"rows": 16}}},
    {"export": {}},
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("compact")
    asked = small_runs.recipe(folder, "compact", sentiment.rows(150), ["onnxruntime"], STAGES)
    assert "compact" in describe(asked, folder / "run")
    assert check(dump(asked)) == asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.latency.measure", without_clocks.measure)
        return run(asked, folder / "run", progress=ConsoleProgress("quiet"))


def test_the_compacted_model_answers_like_the_sparse_one(outcome: Any) -> None:
    variants = {variant["id"]: variant for variant in outcome.report["variants"]}
    assert list(variants) == ["baseline", "sparsify", "compact", "quantize"]
    figures = open_run(outcome.folder).artifacts["compact"].metrics
    assert figures["unread"]["neurons"] > 0
    assert figures["difference"] < 1e-5
    assert variants["compact"]["parameters"] == figures["parameters"]["after"] < variants["sparsify"]["parameters"]
    assert variants["compact"]["macs"] < variants["sparsify"]["macs"]
    assert variants["compact"]["metrics"]["torch"] == variants["sparsify"]["metrics"]["torch"]
    assert variants["quantize"]["parameters"] == variants["compact"]["parameters"]
    assert variants["compact"]["compaction"]["after"] == figures["after"]
    page = (outcome.folder / "report.html").read_text(encoding="utf-8")
    assert 'id="compaction"' in page


def test_it_cannot_follow_quantize(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stages.compact: compact cannot follow quantize"):
        small_runs.recipe(tmp_path, "compact", sentiment.rows(150), ["onnxruntime"], [{"quantize": {}}, {"compact": {}}])


def test_it_is_listed() -> None:
    assert "compact       Removes heads and neurons that zeros have disconnected" in catalogue("stages")
