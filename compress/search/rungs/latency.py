"""Rung 2: latency of the shape before anything is trained, on weights of no meaning.

    time      per shape of the target the least over its engines, each in its recommended mode, int8 where the recipe quantizes
    relative  geometric mean over the shapes of time / time of the baseline's shape, both timed in turns

A candidate is dropped where the shape misses a limit of latency, throughput or speed-up by more than `LEEWAY`: what is served is chosen
later among more modes, so a close miss is not yet a miss. `min_speedup` is judged by (torch / float engine of the baseline, from its own
run) times (baseline / candidate in that engine, from this one): each ratio is of one run.

Left out: candidates are not dropped for being slower than others; what a slower one is worth only its metric tells.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from compress.recipe import Recipe
from compress.run.implicit import shapes
from compress.run.lengths import in_samples
from compress.search.baseline import Baseline
from compress.search.candidate import Candidate, Record, TimedShape
from compress.search.rungs.rung import Rung, Verdict
from compress.search.setup import Setup
from distill.distill import Distill
from export.engines.registry import engine_module
from foundation.artifacts.artifact import digest, write_json
from foundation.core.engines import ENGINES, REFERENCE, EngineName
from foundation.machine import environment
from foundation.measure.latency import Shape
from foundation.models.architecture.shapes import remade
from foundation.models.checkpoint import load, save
from foundation.stage.context import TimedPrecision
from prune.prune import Prune
from quantize.quantize import Quantize

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEEWAY = 1.15
FOLDER = "latencies"


class UntrainedLatency(Rung):
    """Times shapes; see above.

    Args:
        baseline: What the times are related to.
    """

    NAME: ClassVar[str] = "latency"
    ABOUT: ClassVar[str] = "latency of the untrained shape"

    def __init__(self, baseline: Baseline | None = None) -> None:
        self._baseline = baseline

    def absent(self, setup: Setup) -> str | None:
        """It needs shapes that differ and are known before the stages run, and engines to time them in."""
        if not {"latency", "throughput"} & set(setup.search.objectives) and not _limits(setup):
            return "neither an objective nor a goal asks for time"
        if setup.recipe.model.facts.generates:
            return "answers are tokens, which take more than one pass through the model"
        if setup.recipe.target.device != "cpu":
            return "untrained shapes are timed on the CPU alone"
        if not _engines(setup.recipe):
            return "no engine of the target can be timed here"
        if not any(isinstance(stage, Distill | Prune) for stage in setup.own):
            return "all candidates have one shape"
        timed = [str(stage.id) for stage in setup.own if isinstance(stage, Prune) and _shape_is_open(stage)]
        return f"the shape that {timed[0]} makes is known only when it has run" if timed else None

    def measure(self, candidate: Candidate, setup: Setup) -> Record:
        """Returns `relative`, and under `shapes` the `batch`, `sequence`, `engine`, `time_ms` and `baseline_ms` of each."""
        assert self._baseline is not None, "the baseline runs first"
        recipe = self.recipe(candidate, setup)
        config = [step for step in setup.forecast(recipe) if step.lineage][-1].config
        precision: TimedPrecision = "int8" if any(isinstance(stage, Quantize) for stage in recipe.stages) else "fp32"
        known = setup.folder / FOLDER / f"{digest(_key(recipe, config, precision, setup))[:16]}.json"
        if not known.is_file():
            known.parent.mkdir(exist_ok=True)
            write_json(known, self._timed(recipe, config, precision, setup))
        rows: list[TimedShape] = json.loads(known.read_text(encoding="utf-8"))
        best = [min((row for row in rows if _shape(row) == shape), key=lambda row: row["time_ms"]) for shape in _shapes(recipe)]
        ratios = [row["time_ms"] / row["baseline_ms"] for row in best]
        return {"relative": math.exp(sum(map(math.log, ratios)) / len(ratios)), "shapes": best}

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        """Drops what is too slow."""
        found = {}
        for one in wave:
            rows = {_shape(row): row for row in one.records[self.NAME]["shapes"]}
            misses = [(name, excess, text) for name, excess, text in self._excesses(rows, setup) if excess > LEEWAY - 1]
            if misses:
                found[one.number] = Verdict("; ".join(text for *_, text in misses), {name: excess for name, excess, _ in misses})
        return found

    def _timed(self, recipe: Recipe, config: PreTrainedConfig, precision: TimedPrecision, setup: Setup) -> list[TimedShape]:
        """Builds the engines of the baseline and of a model with this config and new weights, and times both."""
        assert self._baseline is not None
        found, wanted = [], _shapes(recipe)
        with tempfile.TemporaryDirectory(dir=setup.folder, prefix=".shape-") as work:
            shape = Path(work, "model")
            shape.mkdir()
            save(remade(load(self._baseline.checkpoint), config), self._baseline.checkpoint, shape, "New weights, to be timed")
            for engine in _engines(recipe):
                target = recipe.target.model_copy(update={"engines": (engine,)})
                context = setup.context_of(recipe.model_copy(update={"target": target}))
                assert context.measure_latency is not None, "prepare provides it"
                pair = [self._baseline.checkpoint, shape]
                for one, (floating, time) in zip(wanted, context.measure_latency.turns(pair, wanted, ["fp32", precision]), strict=True):
                    found.append(TimedShape(batch=one[0], sequence=one[1], engine=engine, time_ms=time, baseline_ms=floating))
        return found

    def _excesses(self, rows: dict[Shape, TimedShape], setup: Setup) -> list[tuple[str, float, str]]:
        """Returns for each goal of time its name, by which share it is missed, and the miss in words."""
        assert self._baseline is not None
        goals, found = setup.recipe.goals, []
        for goal in goals.max_latency_ms:
            time = rows[goal.batch, goal.sequence]["time_ms"] if (goal.batch, goal.sequence) in rows else None
            if time is not None:
                text = f"its shape takes {time:.3g} ms at {_words((goal.batch, goal.sequence))}; goals.max_latency_ms is {goal.value:g}"
                found.append(("max_latency_ms", time / goal.value - 1, text))
        if goals.min_throughput is not None:
            rate = max(1e3 * shape[0] / row["time_ms"] for shape, row in rows.items())
            text = f"its shape does {rate:.4g} rows/s; goals.min_throughput is {goals.min_throughput:g}"
            found.append(("min_throughput", goals.min_throughput / rate - 1, text))
        faster = {shape: self._speedup(shape, row) for shape, row in rows.items()}
        if goals.min_speedup is not None and all(value is not None for value in faster.values()):
            worst = min(faster, key=lambda shape: faster[shape] or math.inf)
            gain = faster[worst] or math.inf
            text = f"its shape is {gain:.3g} times as fast as torch at {_words(worst)}; goals.min_speedup is {goals.min_speedup:g}"
            found.append(("min_speedup", goals.min_speedup / gain - 1, text))
        return found

    def _speedup(self, shape: Shape, row: TimedShape) -> float | None:
        """Returns the speed-up over torch by two ratios of one run each; None where the baseline was not timed."""
        assert self._baseline is not None
        slow, engine = self._baseline.in_torch_ms.get(shape), self._baseline.shared_ms.get((row["engine"], shape))
        return None if slow is None or engine is None else slow / engine * row["baseline_ms"] / row["time_ms"]


def _limits(setup: Setup) -> bool:
    goals = setup.recipe.goals
    return bool(goals.max_latency_ms) or goals.min_throughput is not None or goals.min_speedup is not None


def _shape_is_open(stage: Prune) -> bool:
    """Whether what a stage leaves depends on what it measures: milliseconds, or the words of the data."""
    return stage.measure == "latency" or "vocabulary" in stage.granularity


def _engines(recipe: Recipe) -> list[EngineName]:
    """Returns the engines of the target that are built and run here."""
    names = [name for name in recipe.target.engines if name != REFERENCE and not ENGINES[name].generates]
    return [name for name in names if engine_module(name).absence(recipe.target.device) is None]


def _shapes(recipe: Recipe) -> list[Shape]:
    return shapes(recipe.model.task, in_samples(recipe).target)


def _shape(row: TimedShape) -> Shape:
    return row["batch"], row["sequence"]


def _words(shape: Shape) -> str:
    return f"batch {shape[0]}" + (f", {shape[1]} tokens" if shape[1] is not None else "")


def _key(recipe: Recipe, config: PreTrainedConfig, precision: TimedPrecision, setup: Setup) -> object:
    """Returns everything that the times depend on, JSON types."""
    shape = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "id2label", "label2id")}
    context = setup.context_of(recipe)
    settings = context.measure_latency.settings if context.measure_latency else None
    target = recipe.target.model_dump(mode="json")
    depends: object = json.loads(json.dumps([shape, precision, target, settings, environment.fingerprint()], default=str))
    return depends
