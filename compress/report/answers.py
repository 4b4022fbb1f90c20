"""How well and how fast the engines of a run answer prompts: read from its artifacts, by variant.

The agreement of an engine compares its greedy answers with the float baseline in torch (`foundation.measure.tokens`); its speeds come
from `foundation.measure.generation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from compress.report.evaluations import exported, judged
from compress.report.intervals import paired
from compress.report.model.answers import Agreement, Answer, CacheCost, Speculation
from foundation.artifacts.document import Figures
from foundation.artifacts.exported import Build, Engine, FloatCache, Generation
from foundation.artifacts.run_folder import Run
from foundation.artifacts.timed import Answering, Generated, ProposedSpeed, read_generated
from foundation.measure.answers import load_groups, load_logits, load_predictions
from foundation.measure.fastest import NAMES, Key

Rows = TypeVar("Rows", bound=Answering)


def answers(run: Run, variant: str) -> list[Answer]:
    """Returns the engines of a variant that answer prompts, the recommended one of a build first."""
    return [
        _answer(run, build, entry, entry.generation)
        for build in exported(run).builds
        for entry in build.engines
        if build.variant == variant and entry.runnable and entry.generation is not None
    ]


def _answer(run: Run, build: Build, entry: Engine, generation: Generation) -> Answer:
    key, measured = build.key(entry), _measured(run)
    names = dict(zip(NAMES, key, strict=True))
    return Answer(
        **{name: names[name] for name in ("engine", "mode", "precision", "float_precision")},
        cache_precision=entry.cache_precision,
        metrics=entry.metrics,
        prompt_tokens=generation.prompt_tokens,
        questions=generation.questions,
        quality=generation.quality,
        agreement=Agreement(baseline=generation.baseline, torch=generation.torch),
        cache_cost=_cache_cost(run, entry, generation.float_cache),
        speeds=[row.speed for row in _of(measured.rows, key)],
        speculation=_speculation(entry.speculation, [row.speed for row in _of(measured.proposals, key)]),
    )


def _cache_cost(run: Run, entry: Engine, other: FloatCache | None) -> CacheCost | None:
    """Compares an engine with the same engine with a float cache (`export.generation.float_cache`); None where its own is one."""
    made = run.of_kind("engine")
    if other is None or made is None:
        return None
    before, labels = load_predictions(made.path / other.predictions, run.recipe["model"]["task"])
    after = load_logits(made.path / str(entry.predictions))
    groups = load_groups(run.predictions(run.baseline))
    change = paired(judged(run).metric, before, after, labels, groups=groups)
    return CacheCost(metrics=other.metrics, change=change, tokens=other.tokens)


def _of(rows: Sequence[Rows], key: Key) -> list[Rows]:
    """Returns the rows of one engine."""
    return [row for row in rows if row.key == key]


def _speculation(told: Figures | None, speeds: Sequence[ProposedSpeed]) -> Speculation | None:
    if told is None:
        return None
    figures = ("draft", "tokens", "compared", "proposed", "accepted", "tokens_per_step")
    return Speculation(**{key: told[key] for key in figures}, speeds=speeds)


def bandwidth(run: Run) -> float | None:
    """Returns the bytes per second that the machine read when the speeds were measured; None where no engine answers prompts."""
    return _measured(run).bandwidth_bytes_per_s


def _measured(run: Run) -> Generated:
    """Returns what the step `latency` wrote about answers; empty where no engine answers prompts."""
    step = run.of_kind("latency")
    return Generated() if step is None else read_generated(step.path)
