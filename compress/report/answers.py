"""How well and how fast the engines of a run answer prompts: read from its artifacts, by variant.

The agreement of an engine compares its greedy answers with the float baseline in torch (`foundation.measure.tokens`); its speeds come
from `foundation.measure.generation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.report.evaluations import exported, judged
from compress.report.intervals import paired
from compress.report.model.answers import Answer
from foundation.artifacts import artifact
from foundation.artifacts.exported import Build, Engine, FloatCache, Generation
from foundation.artifacts.run_folder import Run
from foundation.core.engines import REFERENCE
from foundation.measure.answers import load_groups, load_logits, load_predictions
from foundation.measure.fastest import NAMES

GENERATION = "generation.json"


def answers(run: Run, variant: str) -> list[Answer]:
    """Returns the engines of a variant that answer prompts, the recommended one of a build first."""
    return [
        _answer(run, build, entry, entry.generation)
        for build in exported(run).builds
        for entry in build.engines
        if build.variant == variant and entry.runnable and entry.generation is not None
    ]


def _answer(run: Run, build: Build, entry: Engine, generation: Generation) -> Answer:
    what = dict(zip(NAMES, build.key(entry), strict=True))
    measured, variant = _measured(run), what.pop("variant")
    what = {key: what[key] for key in ("engine", "mode", "precision", "float_precision")}
    return Answer.model_validate(
        {
            **what,
            "cache_precision": entry.cache_precision,
            "metrics": entry.metrics,
            "prompt_tokens": generation.prompt_tokens,
            "questions": generation.questions,
            "quality": generation.quality,
            "agreement": {"baseline": generation.baseline, REFERENCE: generation.torch},
            "cache_cost": _cache_cost(run, entry, generation.float_cache),
            "speeds": _of(measured.get("rows", []), variant, what),
            "speculation": _speculation(entry.speculation, _of(measured.get("proposals", []), variant, what)),
        }
    )


def _cache_cost(run: Run, entry: Engine, other: FloatCache | None) -> dict[str, Any] | None:
    """Compares an engine with the same engine with a float cache (`export.generation.float_cache`); None where its own is one."""
    made = run.of_kind("engine")
    if other is None or made is None:
        return None
    before, labels = load_predictions(made.path / other.predictions, run.recipe["model"]["task"])
    after = load_logits(made.path / str(entry.predictions))
    groups = load_groups(run.predictions(run.baseline))
    change = paired(judged(run).metric, before, after, labels, groups=groups)
    return {"metrics": other.metrics, "change": change, "tokens": other.tokens}


def _of(rows: Sequence[Mapping[str, Any]], variant: str, what: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of one engine, without what it is."""
    mine = [row for row in rows if row["variant"] == variant and all(row[key] == value for key, value in what.items())]
    return [{key: value for key, value in row.items() if key not in ("variant", "device", "cache_precision", *what)} for row in mine]


def _speculation(told: Mapping[str, Any] | None, speeds: list[dict[str, Any]]) -> dict[str, Any] | None:
    if told is None:
        return None
    kept = ("draft", "tokens", "compared", "proposed", "accepted", "tokens_per_step")
    return {**{key: told[key] for key in kept}, "speeds": speeds}


def bandwidth(run: Run) -> float | None:
    """Returns the bytes per second that the machine read when the speeds were measured; None where no engine answers prompts."""
    rate: float | None = _measured(run).get("bandwidth_bytes_per_s")
    return rate


def _measured(run: Run) -> dict[str, Any]:
    """Returns what the step `latency` wrote about answers; empty where no engine answers prompts."""
    step = run.of_kind("latency")
    if step is None or not (step.path / GENERATION).exists():
        return {}
    found: dict[str, Any] = artifact.read_json(step.path / GENERATION)
    return found
