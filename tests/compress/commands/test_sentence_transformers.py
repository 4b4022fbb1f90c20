"""`compress sentence-transformers`: which checkpoint and which build a model of a run is; the folder itself is tested in `tests/export`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import app
from compress.commands import sentence_transformers as command
from compress.report import evaluations
from foundation.artifacts.exported import Build, Exported

EXPORTED = SimpleNamespace(path=Path("run/stages/export-1"))
VARIANTS = {"baseline": SimpleNamespace(path=Path("run/stages/model-1")), "quantize": SimpleNamespace(path=Path("run/stages/quantize-1"))}
BUILDS = (Build(folder="baseline-fp32", variant="baseline"), Build(folder="quantize-int8", variant="quantize"))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    run = SimpleNamespace(of_kind=lambda kind: EXPORTED if kind == "engine" else None, variants=VARIANTS)
    monkeypatch.setattr(command, "opened", lambda folder: run)
    monkeypatch.setattr(evaluations, "exported", lambda opened: Exported(builds=BUILDS))
    monkeypatch.setattr(command, "write_folder", lambda checkpoint, build, out: calls.append((checkpoint.folder, build, out)) or out)
    return calls


def test_a_model_is_a_checkpoint_and_its_build(written: list[Any]) -> None:
    done = CliRunner().invoke(app, ["sentence-transformers", "run", "quantize-int8", "vectors"])
    assert (done.exit_code, done.stdout.strip()) == (0, "vectors")
    assert written == [(Path("run/stages/quantize-1"), Path("run/stages/export-1/quantize-int8"), Path("vectors"))]


def test_an_unknown_model_names_the_nearest_one_and_writes_nothing(written: list[Any]) -> None:
    done = CliRunner().invoke(app, ["sentence-transformers", "run", "quantise-int8", "vectors"])
    assert done.exit_code == 2
    assert "quantise-int8" in done.stderr
    assert "quantize-int8" in done.stderr
    assert written == []


def test_a_run_without_an_export_is_refused(written: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "exported", lambda opened: Exported())
    done = CliRunner().invoke(app, ["sentence-transformers", "run", "quantize-int8", "vectors"])
    assert done.exit_code == 2
    assert "export" in done.stderr
    assert written == []
