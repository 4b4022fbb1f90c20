"""Checkpoints as engines that are timed: groups are put on one scale, and every engine is built as it would be exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.run.timer import Timer
from export.engines.openvino import computes_bf16
from export.export import Export
from foundation.artifacts.timed import Timing
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.stage.context import Context
from quantize.quantize import Quantize
from tests.export import sentiment
from tests.problems import raises_problem
from tests.told import Told


@pytest.fixture
def context(tmp_path: Path) -> Context:
    rows = sentiment.rows(40)
    split = Split(rows[:32], ClassIds(np.arange(32) % 2))
    data = Data(split, Split(rows[32:], ClassIds(np.arange(8) % 2)), split, ("negative", "positive"))
    target = Target(engines=("openvino",), batch_sizes=(1, 2), sequence_lengths=(8,), threads=1)
    return Context("text-classification", data, 16, target, 0, Told(), tmp_path / "scratch")


@dataclass(frozen=True)
class Built:
    """What stands for an engine: the name of its folder."""

    name: str


def test_groups_are_put_on_the_scale_of_the_first(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast in the second group: what is told must not show it."""
    true, groups = {str(number): 1.0 + number for number in range(7)}, []

    def measured(jobs: Any, shapes: Any, progress: Any) -> list[tuple[int, Timing]]:
        groups.append([job.name for job in jobs])
        cells = [(job, batch, sequence) for job in jobs for batch, sequence in shapes]
        return [(0, Timing(batch=b, sequence=s, p50_ms=true[job.name] * len(groups) * b)) for job, b, s in cells]

    monkeypatch.setattr(Timer, "_engine", lambda self, checkpoint, folder: Built(folder.name))
    monkeypatch.setattr("compress.run.timer.measure", measured)
    timer = Timer(context, Quantize(), Export())
    found = timer([tmp_path] * 7, (1, 8), "fp32")
    assert groups == [["0", "1", "2", "3", "4"], ["0", "5", "6"]]
    assert found == pytest.approx([1.5 * true[str(number)] for number in range(7)])
    groups.clear()
    assert timer([tmp_path], (1, 8), "fp32") == [1.0]
    groups.clear()
    both = timer.turns([tmp_path] * 7, [(1, 8), (3, None)], "fp32")
    assert both == [pytest.approx([1.5 * b * true[str(number)] for number in range(7)]) for b in (1, 3)]
    assert len(groups) == 2, "engines are built once, not once for each shape"
    assert not list(tmp_path.glob("engines-*"))


def test_a_slow_phase_in_the_turns_of_all_changes_no_ratio(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The medians of the samples fall into different phases of the machine: 1.0 and 0.6 ms, where each turn says four times."""

    def measured(jobs: Any, shapes: Any, progress: Any) -> list[tuple[int, Timing]]:
        slow = Timing(batch=1, sequence=8, p50_ms=1.0, turns_ms=(1.0, 1.0, 2.4))
        fast = Timing(batch=1, sequence=8, p50_ms=0.6, turns_ms=(0.25, 0.25, 0.6))
        return [(0, slow), (1, fast)]

    monkeypatch.setattr(Timer, "_engine", lambda self, checkpoint, folder: Built(folder.name))
    monkeypatch.setattr("compress.run.timer.measure", measured)
    assert Timer(context, Quantize(), Export())([tmp_path] * 2, (1, 8), "fp32") == pytest.approx([1.0, 0.25])


def test_int8_is_what_the_recipe_quantizes_to(context: Context, tmp_path: Path) -> None:
    from foundation.models.folder import Checkpoint
    from foundation.schemes.checkpoint import load_quantization

    for scheme in ("w8a8", "w8a8-dynamic"):
        timer = Timer(context, Quantize(scheme=scheme, exclude=("no.such.layer",)), Export())
        out = timer._quantized(sentiment.checkpoint(), tmp_path / scheme)
        assert Checkpoint(out).scheme == scheme
        assert load_quantization(out)[0]
    assert isinstance(context.progress, Told)
    assert (context.progress.lines, context.progress.warnings) == ([], [])


@pytest.mark.whole
def test_an_engine_that_does_not_run_here_is_said(context: Context, tmp_path: Path) -> None:
    timer = Timer(context, Quantize(scheme="fp8"), Export())
    fp8 = timer._quantized(sentiment.checkpoint(), tmp_path / "fp8")
    with raises_problem("target.engines", "openvino", "OpenVINO on a CPU"):
        timer._engine(fp8, tmp_path)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "torch"])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_real_engines_are_timed(engine: Any, precision: Any, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.MAX_SECONDS", 0.05)
    opened: list[str] = []
    build: Callable[..., Any] = Timer._engine

    def watched(*args: Any) -> Any:
        spec = build(*args)
        opened.append(f"{spec.engine} {spec.precision} {spec.mode} {spec.float_precision}")
        return spec

    monkeypatch.setattr(Timer, "_engine", watched)
    asked = replace(context, target=context.target.model_copy(update={"engines": (engine,)}))
    (tmp_path / "work").mkdir()
    link = tmp_path / "work" / "checkpoint"
    link.symlink_to(sentiment.checkpoint())
    found = Timer(asked, Quantize(), Export())([link, link], (2, 8), precision)
    assert len(found) == 2
    assert min(found) > 0
    mode = {"openvino": "static", "onnxruntime": "dynamic", "torch": "eager"}[engine]
    rest = "bf16" if (engine, precision) == ("openvino", "int8") and computes_bf16() else "fp32"
    assert opened == [f"{engine} {precision} {mode} {rest}"] * 2
