"""Milliseconds asked for: the search on made-up engines, and what the stage makes of it. No clock is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import with_layers
from foundation.models.checkpoint import load
from foundation.stage.context import Context
from prune.latency.budget import TOLERANCE
from prune.latency.timing import Timing, table_folder
from prune.prune import Prune
from tests.problems import raises_problem
from tests.prune.small_runs import pruned
from tests.seldom import seldom
from tests.without_clocks import blocks_of

pytestmark = pytest.mark.whole

QUICK: dict[str, Any] = {"method": "magnitude", "allocation": "global", "multiple_of": 4, "rows": 32, "recover": None, "measure": "latency"}


class Engine:
    """Times checkpoints by their sizes, and keeps what it was asked.

    A block takes 0.1 ms, a head 0.2 ms, a neuron 0.01 ms, embeddings and head 0.5 ms; `caches` is what a model of less than half of its
    neurons saves on top of that: what no table of parts knows.
    """

    def __init__(self, caches: float = 0.0) -> None:
        self.caches, self.asked = caches, list[tuple[int, tuple[int, int | None], str]]()

    settings = None

    def __call__(self, checkpoints: Sequence[Path], shape: tuple[int, int | None], precision: str) -> list[float]:
        self.asked.append((len(checkpoints), shape, precision))
        return [self.time(blocks_in(folder)) for folder in checkpoints]

    def time(self, blocks: list[tuple[int, int]]) -> float:
        ms = 0.5 + sum(0.1 + 0.2 * heads + 0.01 * ffn for heads, ffn in blocks)
        return ms * (1 - self.caches * (len(set(blocks)) > 1))  # blocks of the table are all alike


def blocks_in(checkpoint: Path) -> list[tuple[int, int]]:
    """Returns the heads and neurons of each block, as the config says."""
    return blocks_of(json.loads((checkpoint / "config.json").read_text()))


WHOLE = 0.5 + 3 * (0.1 + 0.8 + 0.24)


WRITE = Timing._write


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _configs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up engines read the config of a checkpoint; weights would take most of the time of these tests."""

    def write(self: Timing, config: Any, folder: Path) -> Path:
        config.save_pretrained(folder)
        return folder

    monkeypatch.setattr(Timing, "_write", write)


def test_what_is_timed_is_a_whole_checkpoint(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loading(Engine):
        def __call__(self, checkpoints: Sequence[Path], shape: tuple[int, int | None], precision: str) -> list[float]:
            assert all((folder / "tokenizer.json").is_file() for folder in checkpoints)
            return [float(len(load(folder).bert.encoder.layer)) for folder in checkpoints]

    monkeypatch.setattr(Timing, "_write", WRITE)
    model, context = load(checkpoint("bert")), replace(make_context(), measure_latency=Loading())
    timing = Timing(model, checkpoint("bert"), context, (1, 8), "fp32", tmp_path / "times")
    assert timing.of([with_layers(model.config, [0]), model.config]) == [1, 3]


@pytest.mark.parametrize(
    ("settings", "asked", "caches"),
    [
        pytest.param({"latency_ms": {"sequence": 8, "value": 3.0}}, 3.0, 0.0, marks=pytest.mark.slow),
        ({"latency_ms": {"batch": 8, "sequence": 16, "value": 2.2}}, 2.2, 0.15),
        ({"speedup": 1.5, "schedule": "cubic", "iterations": 2, "recover": {"epochs": 0.1}}, WHOLE / 1.5, 0.15),
    ],
    ids=str,
)
def test_what_is_asked_for_is_measured_in_the_end(
    settings: dict[str, Any],
    asked: float,
    caches: float,
    checkpoint: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> None:
    engine = Engine(caches)
    context = replace(make_context(), measure_latency=engine)
    figures = pruned(Prune(**{**QUICK, **settings}), checkpoint("bert"), context, tmp_path / "out")[1]
    told = figures["latency"]
    made = engine.time(blocks_in(tmp_path / "out"))
    assert told["after"]["measured_ms"] == pytest.approx(made)
    assert 0.9 * asked <= made <= asked
    assert told["asked_ms"] == pytest.approx(asked)
    assert told["before"] == {"predicted_ms": pytest.approx(WHOLE), "measured_ms": pytest.approx(WHOLE)}
    assert len(told["rounds"]) == 1 or caches or abs(told["rounds"][0]["measured_ms"] / asked - 1) > TOLERANCE
    assert (told["engine"], told["precision"], told["batch"]) == (
        "openvino",
        "int8",
        8 if "latency_ms" not in settings or told["sequence"] == 16 else 1,
    )
    assert {shape for _, shape, _ in engine.asked} == {(told["batch"], told["sequence"])}
    assert json.loads(json.dumps(figures)) is not None


def test_a_share_of_the_milliseconds_is_taken_away(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    context = replace(make_context(), measure_latency=Engine())
    figures = pruned(Prune(**QUICK, sparsity=0.4, precision="fp32"), checkpoint("bert"), context, tmp_path / "out")[1]
    assert figures["measure"] == "latency"
    assert figures["sparsity"] == pytest.approx(0.4, abs=0.02)
    assert figures["cost"]["before"] == pytest.approx(WHOLE - 0.5)
    assert figures["cost"]["after"] == pytest.approx(figures["latency"]["after"]["predicted_ms"] - 0.5)
    assert figures["latency"]["after"]["measured_ms"] == pytest.approx(figures["latency"]["after"]["predicted_ms"])
    assert figures["latency"]["asked_ms"] is None


@pytest.mark.slow
@pytest.mark.parametrize("granularity", seldom([["heads", "ffn"], ["layers", "heads", "ffn"]], [["heads", "ffn"]]), ids=str)
def test_masks_are_learned_against_the_clock(
    granularity: list[str], checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    engine = Engine()
    learn = {"epochs": 20, "learning_rate": 1e-3, "batch_size": 16}
    stage = Prune(**{**QUICK, "method": "joint", "learn": learn, "granularity": granularity, "latency_ms": {"sequence": 8, "value": 2.2}})
    figures = pruned(stage, checkpoint("bert"), replace(make_context(), measure_latency=engine), tmp_path / "out")[1]
    assert engine.time(blocks_in(tmp_path / "out")) == pytest.approx(2.2, rel=0.1)
    asked = (WHOLE - 2.2) / (WHOLE - 0.5)
    assert figures["steps"][0]["learned"]["sparsity"] == pytest.approx(asked, abs=0.07)


@pytest.mark.slow
def test_a_table_is_measured_once_on_a_machine(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made = Engine(), list[tuple[int, ...]]()
    config = Timing._config
    monkeypatch.setattr(Timing, "_config", lambda self, sizes, *point: made.append(point[:-1]) or config(self, sizes, *point))
    context = replace(make_context(), measure_latency=engine)
    stage = Prune(**QUICK, speedup=2.0)
    first = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "a"), tmp_path / "first")[1]
    assert [number for number, *_ in engine.asked] == [12, 1, 2]
    assert len(set(made)) == len(made) == 12
    again = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "b"), tmp_path / "again")[1]
    assert [number for number, *_ in engine.asked] == [12, 1, 2, 1, 2]
    assert again["latency"] == first["latency"]
    assert len(made) == 13  # the largest, by which the table is known
    after_a_kill = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "b"), tmp_path / "third")[1]
    assert len(engine.asked) == 5
    assert after_a_kill == again
    (file,) = table_folder().iterdir()
    file.write_text('{"table": {"rest_ms"')  # cut off by a kill
    other = replace(context, scratch=tmp_path / "c", fingerprint={"hardware": {"cpu": "another"}})
    pruned(stage, checkpoint("bert"), other, tmp_path / "other")
    assert engine.asked[5][0] == 12
    pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "d"), tmp_path / "repaired")
    assert engine.asked[8][0] == 12


def test_what_nothing_reaches_is_said(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    context = replace(make_context(), measure_latency=Engine())
    with raises_problem("stages.prune.speedup", "0.392 ms", "smallest", "1.52 ms", "allow more"):
        pruned(Prune(**QUICK, speedup=10.0), checkpoint("bert"), context, tmp_path / "out")
    for latency, message in (
        ({"batch": 3, "sequence": 8, "value": 1.0}, r"latency_ms.batch: 3 given; give a batch size of the target: 1, 8"),
        ({"sequence": 9, "value": 2.0}, r"latency_ms.sequence: 9 given; give a sequence length of the target: 8, 16"),
        ({"value": 3.0}, r"latency_ms.sequence: None given"),
    ):
        with pytest.raises(InputError, match=f"stages.prune.{message}"):
            pruned(Prune(**QUICK, latency_ms=latency), checkpoint("bert"), context, tmp_path / str(latency["value"]))


def test_blocks_that_take_no_time_are_said(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    class Noise(Engine):
        def time(self, blocks: list[tuple[int, int]]) -> float:
            return 1.0 + 0.01 * (len(blocks) < 6)

    message = (
        r"prune.measure: latency given; .*: 6 blocks take 1 ms and 2 take 1.01 ms, so their latency .*; give measure: macs, or a larger"
    )
    with pytest.raises(InputError, match=message):
        pruned(Prune(**QUICK, sparsity=0.3), checkpoint("bert"), replace(make_context(), measure_latency=Noise()), tmp_path / "out")
    assert not list(table_folder().glob("*.json"))


@pytest.mark.parametrize("granularity", [["layers"], ["heads"], ["layers", "heads", "ffn"], ["heads", "ffn"]], ids=str)
@pytest.mark.parametrize("asked", [{"speedup": 50.0}, {"speedup": 1.1}, {"latency_ms": {"value": 1.0}}, {"sparsity": 0.9}], ids=str)
def test_a_plan_is_made_before_anything_is_measured(granularity: Any, asked: dict[str, Any], make_model: Callable[..., Any]) -> None:
    config = make_model("bert").config
    assert Prune(**{**QUICK, "granularity": granularity, **asked}).config_after(config).num_hidden_layers >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speedup": 2.0, "measure": "macs"}, "speedup: given with measure: macs; give measure: latency"),
        ({"speedup": 2.0, "sparsity": 0.3}, "speedup: given together with sparsity; give only one"),
        ({"speedup": 2.0, "latency_ms": {"value": 1}}, "latency_ms: given together with speedup; give only one"),
        ({"granularity": ["hidden", "ffn"]}, "measure: latency given; the latency table does not cover hidden"),
        ({"speedup": 2.0, "granularity": ["vocabulary"]}, "the vocabulary is not part of the blocks"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune(**{**QUICK, **settings})


@pytest.mark.parametrize("outside", seldom([["layers"], []], [[]]), ids=str)
def test_other_layers_in_another_round_are_scanned_when_they_are_asked_for(
    outside: list[str], checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    engine = Engine(0.15)
    context = replace(make_context(), measure_latency=engine)
    stage = Prune(**{**QUICK, "allocation": "sensitivity", "granularity": [*outside, "heads", "ffn"]}, speedup=1.5)
    figures = pruned(stage, checkpoint("bert"), context, tmp_path / "out")[1]
    told = [(entry["name"], entry["what"]) for entry in figures["sensitivity"]["layers"]]
    assert len(set(told)) == len(told) == 6
    assert 0.9 * WHOLE / 1.5 <= figures["latency"]["after"]["measured_ms"] <= WHOLE / 1.5


def test_the_least_time_with_layers_is_said(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    """One layer of one head and four neurons: 0.5 + 0.1 + 0.2 + 0.04 ms."""
    context = replace(make_context(), measure_latency=Engine())
    stage = Prune(**{**QUICK, "granularity": ["layers", "heads", "ffn"]}, latency_ms={"sequence": 8, "value": 0.7})
    with raises_problem("stages.prune.latency_ms", "0.7 ms", "smallest", "0.84 ms"):
        pruned(stage, checkpoint("bert"), context, tmp_path / "out")
