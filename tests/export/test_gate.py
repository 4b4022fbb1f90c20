"""The parity gate and the evaluation split: what is left out is decided before an evaluation row is read. No engine is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.builds import Build
from export.choices import Generation
from export.engines.spec import engine_entry
from export.exporter import Exporter
from export.generation.agreement import Agreement
from export.parity.parity import ParityError
from export.parity.rows import GATE_ROWS, gate_rows
from foundation.artifacts.exported import Shares
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from tests.export import sentiment

pytestmark = pytest.mark.whole


@dataclass(frozen=True)
class Untouched(Split):
    """A split that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("rows", "labels", "keys", "take"):
            raise AssertionError(f"the evaluation split was read: {name}")
        return super().__getattribute__(name)


def numbered(count: int, start: int) -> Split:
    return Split([f"good film {start + number}" for number in range(count)], ClassIds(np.arange(count) % 2))


@pytest.fixture
def context(tmp_path: Path) -> Context:
    target = Target(engines=("openvino",), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    made = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint()}, target, count=6)
    words = sentiment.WORDS
    selection = Split([f"{words[number]} {words[number + 1]} movie" for number in range(12)], ClassIds(np.arange(12) % 2))
    return replace(made, data=replace(made.data, selection=selection))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Any]]]:
    """What processes of engines are asked for, by mode; those of the mode wrong answer wrongly."""
    found: list[tuple[str, list[Any]]] = []

    class Process:
        def __init__(self, mode: str) -> None:
            self.mode = mode

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, op: str) -> dict[str, dict[str, str]]:
            assert op == "reported"
            return {"reported": {}}

        def predict(self, rows: list[Any], batch_size: int, on_rows: Any) -> Any:
            found.append((self.mode, list(rows)))
            prepared = exporter_of[0].preprocessor
            return predict(load(sentiment.checkpoint()), prepared, rows, batch_size) + np.float32(self.mode == "wrong")

    monkeypatch.setattr("export.engines.spec.spec_of", lambda out, build, entry, target: Spec(entry.mode))
    monkeypatch.setattr("export.exporter.EngineProcess", lambda spec: Process(spec.mode))
    monkeypatch.setattr(Exporter, "_share", lambda *_: Shares(int8_share=0.0))
    monkeypatch.setattr(Exporter, "_layers", lambda self, process, model, engine: self.gate.split.rows and [])
    return found


exporter_of: list[Exporter] = []


@dataclass
class Spec:
    mode: str
    evaluation_batch: int = 4


def exporter(context: Context, out: Path, modes: list[str]) -> Exporter:
    out.mkdir()
    made = Exporter(
        Build("baseline", Checkpoint(sentiment.checkpoint()), "fp32", "baseline"),
        context,
        out,
        "fp32",
        {},
        Agreement(context, Generation()),
    )
    made._onnx = lambda: out / "model.onnx"  # type: ignore[method-assign]
    made._build = lambda engine, model: iter([engine_entry(engine, mode) for mode in modes])  # type: ignore[method-assign]
    exporter_of[:] = [made]
    return made


def test_a_mode_answers_evaluation_rows_only_after_it_has_passed(
    context: Context, asked: list[tuple[str, list[Any]]], tmp_path: Path
) -> None:
    build = exporter(context, tmp_path / "out", ["wrong", "static"]).run()
    selection, evaluation = context.data.selection.rows, context.data.evaluation.rows
    assert asked == [("wrong", selection), ("static", selection), ("static", evaluation)]
    passed, failed = build.engines
    assert passed.parity is not None
    assert (passed.mode, passed.runnable, passed.n, passed.parity.n) == ("static", True, len(evaluation), len(selection))
    assert (failed.mode, failed.runnable, failed.n, failed.metrics, failed.predictions) == ("wrong", False, 0, {}, None)
    assert "predictions differ from torch" in str(failed.reason)
    assert failed.parity is not None
    assert failed.parity.passed is False


def test_a_stage_that_fails_has_not_read_the_evaluation_split(context: Context, asked: list[Any], tmp_path: Path) -> None:
    untouched = replace(context, data=replace(context.data, evaluation=Untouched([], np.zeros(0))))
    with pytest.raises(ParityError, match="parity: baseline-fp32 openvino wrong"):
        exporter(untouched, tmp_path / "out", ["wrong"]).run()
    with pytest.raises(AssertionError, match="the evaluation split was read"):
        exporter(untouched, tmp_path / "passes", ["static"]).run()


def test_what_is_left_out_does_not_depend_on_the_evaluation_split(context: Context, asked: list[Any], tmp_path: Path) -> None:
    kept = []
    for number, evaluation in enumerate((context.data.evaluation, context.data.selection.take([0]))):
        other = replace(context, data=replace(context.data, evaluation=evaluation))
        build = exporter(other, tmp_path / str(number), ["wrong", "static"]).run()
        kept.append([(entry.mode, entry.runnable, entry.reason, entry.parity) for entry in build.engines])
    assert kept[0] == kept[1]


def test_the_rows_of_the_gate_are_spread_over_the_selection_split() -> None:
    train, evaluation = numbered(30, 0), Untouched([], np.zeros(0))
    assert gate_rows(Data(train, numbered(7, 100), evaluation, ())).rows == numbered(7, 100).rows
    many = gate_rows(Data(train, numbered(3 * GATE_ROWS, 100), evaluation, ()))
    assert many.rows == numbered(3 * GATE_ROWS, 100).rows[::3]
    assert many.labels.array.tolist() == numbered(3 * GATE_ROWS, 100).labels.array[::3].tolist()
    assert gate_rows(Data(train, numbered(0, 0), evaluation, ())).rows == train.rows
