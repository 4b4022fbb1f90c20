"""Chooses the served configuration: the one that misses the fewest goals, then the fastest.

A configuration is a model in an engine: (variant, precision, float precision, engine, mode). Configurations of the last variant compete
with configurations of the float model that it was made of, so that int8 is served where it wins and float where it does not.

    time     geometric mean over the target shapes of the median latency; with goals.max_latency_ms over their shapes, of their percentiles,
             or of the highest lower one that all candidates have (a p99 needs 200 samples); with goals.min_throughput and no limit on
             latency the time for a row at the best shape
    served   the fewest goals missed; of those the simplest of the equally fast ones. Equally fast is what is within `CLOSE` of the least
             time, or within `FAR` with a 95 % interval of the ratio that reaches `CLOSE`, or takes at most `NEGLIGIBLE_MS` longer
    simplest the smallest files (within `SAME_SIZE`), then one precision before two, then by the order of `MODES`, then the least time

The time is relative, so no shape outweighs another. All figures come from one latency step, in which the engines took turns, and ratios
are formed within turns (`foundation.measure.turns`). With noise in the times every configuration near the fastest one is the fastest now
and then. `CLOSE` is wider than that noise, so that size and simplicity choose among them, which no noise changes. The metric is measured
on the evaluation split. A configuration is chosen by it only where it decides whether `goals.max_drop` is met.

Not here: other numbers of threads than the target's, and engines that answer prompts (`foundation.measure.fastest_answers`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.core.engines import REFERENCE, served_on
from foundation.labels.tasks import TASKS, Task
from foundation.measure.judged import Judged, known_metric
from foundation.measure.turns import log_ratios, quantile, ratio

if TYPE_CHECKING:  # pydantic, which the Python API is imported without
    from foundation.artifacts.exported import Build, Engine
    from foundation.artifacts.timed import Timing, VariantTiming
    from foundation.core.goals import Goals, LatencyGoal
    from foundation.core.target import Target

EXPORTED = "export.json"
CLOSE = 0.05
"""Times that differ by less are taken for equal: geometric means over shapes repeat between quiet runs to about half of this."""
CLOSE_BEFORE = 0.02
"""The same for runs of earlier versions, whose rows have no turns: the smallest of the equally fast ones was served, and stays so."""
FAR = 0.12
"""No interval makes times that differ by more equal. Turns of calls of 0.15 ms differ by 25 % between one another now and then, and their
interval then reaches engines that are slower in every run."""
NEGLIGIBLE_MS = 0.05
"""Times of a call that differ by less are taken for equal: two processes of the same engine differ by up to 0.03 ms each, and a server adds
fourteen times as much to every call."""
SAME_SIZE = 0.01
"""Files that differ by less in size are taken for equally large."""
MODES = ("dynamic", "static", "eager", "compiled")
"""The simpler mode first: one graph for every shape before one for each."""
EXACT = 1e-9
PERCENTILES = (99, 90, 50)
"""Quantiles of a latency row, the highest first."""
Shape = tuple[int, int | None]
NAMES = ("variant", "precision", "float_precision", "engine", "mode")
Key = tuple[str, str, str, str, str]
"""The values of `NAMES`, in order."""


@dataclass(frozen=True)
class Candidate:
    """A configuration that could be served, with its measured figures."""

    key: Key
    metric: float
    """The primary metric on the evaluation split."""
    size_bytes: int
    """What the engine loads."""
    rows: Mapping[Shape, Timing]
    """Its latency row at each target shape."""

    @property
    def names(self) -> dict[str, str]:
        """The key as a map."""
        return dict(zip(NAMES, self.key, strict=True))


@dataclass(frozen=True)
class Ranked:
    """A candidate with what it is judged by."""

    candidate: Candidate
    missed: tuple[str, ...]
    """The goals that it misses."""
    time_ms: float
    """See above."""


@dataclass(frozen=True)
class Scale:
    """The reference that candidates are compared with."""

    metric: str
    before: float
    """The primary metric of the baseline in torch."""
    reference: Mapping[Shape, Timing]
    """Latency rows of the baseline in torch, fp32, eager."""


@dataclass(frozen=True)
class Measured:
    """The artifacts of a run that the choice is made of."""

    exported: Path
    """Folder of export.json."""
    latency: Path
    """Folder of latency.json."""
    line: Sequence[str]
    """Ids of the variants that led to the last one, itself last (`foundation.artifacts.artifact.lineage`)."""
    baseline: str
    before: float
    """The primary metric of the baseline in torch."""


def competes(task: Task, target: Target) -> bool:
    """Whether configurations of a task compete on a target: on the CPU, where `target.serve` says so, and answers are not tokens."""
    return target.device == "cpu" and target.serve == "fastest" and not TASKS[task].generates


def fastest(measured: Measured, goals: Goals, judged: Judged) -> list[Ranked]:
    """Returns the configurations that compete, the one to serve first; empty where none was built and timed.

    Args:
        measured: The artifacts.
        goals: The goals of the recipe.
        judged: The metric that is judged.
    """
    from foundation.artifacts.document import read
    from foundation.artifacts.exported import Exported
    from foundation.artifacts.timed import read_latency

    builds, latency = read(Exported, measured.exported / EXPORTED).builds, read_latency(measured.latency)

    def metric(entry: Engine) -> float:
        return judged.figure(entry.figures, measured.exported / str(entry.predictions))

    found = candidates(builds, latency, competing(builds, measured.line), metric)
    return ranking(found, goals, Scale(judged.name, measured.before, reference_rows(latency, measured.baseline)))


def key_of(build: Mapping[str, object], entry: Mapping[str, object]) -> Key:
    """Returns the configuration of an engine of export.json: `entry` in its build."""
    rest = entry.get("float_precision", build["float_precision"])
    return str(build["variant"]), str(build["precision"]), str(rest), str(entry["engine"]), str(entry["mode"])


def candidates(
    builds: Iterable[Build], latency: Iterable[VariantTiming], variants: Sequence[str], metric: Callable[[Engine], float]
) -> list[Candidate]:
    """Returns the configurations that could be served on the CPU, in the order of export.json.

    Args:
        builds: `builds` of export.json.
        latency: The rows of latency.json.
        variants: Ids of the variants that compete.
        metric: Returns the judged metric of an engine.
    """
    timed: dict[Key, dict[Shape, Timing]] = {}
    for row in latency:
        timed.setdefault(row.key, {})[row.shape] = row
    found = []
    for build in builds:
        for entry in build.engines:
            key = build.key(entry)
            if build.variant in variants and entry.runnable and entry.engine in served_on("cpu") and key in timed:
                assert entry.size_bytes is not None, f"the export stage measures {entry.engine}"
                found.append(Candidate(key, metric(entry), entry.size_bytes, timed[key]))
    return found


def competing(builds: Iterable[Build], line: Sequence[str]) -> list[str]:
    """Returns the variants that compete: the last one, and the float one that it was made of. A model without adapters gives other answers
    than one with them, and does not compete with it.

    Args:
        builds: `builds` of export.json.
        line: Ids of the variants that led to the last one, itself last.
    """
    builds = list(builds)
    adapted = {build.variant for build in builds if build.adapters}
    floating = {build.variant for build in builds if build.precision == "fp32" and (build.variant in adapted) == (line[-1] in adapted)}
    made_of = next((name for name in reversed(line) if name in floating), line[-1])
    return list(dict.fromkeys((line[-1], made_of)))


def reference_rows(latency: Iterable[VariantTiming], baseline: str) -> dict[Shape, Timing]:
    """Returns the rows that speed-ups refer to, by shape: the baseline in torch, fp32, eager."""
    wanted = (baseline, REFERENCE, "fp32", "eager")
    return {row.shape: row for row in latency if (row.variant, row.engine, row.precision, row.mode) == wanted}


def ranking(candidates: Iterable[Candidate], goals: Goals, scale: Scale) -> list[Ranked]:
    """Returns the candidates, the one to serve first.

    Args:
        candidates: The candidates.
        goals: The goals of the recipe.
        scale: The baseline.
    """
    candidates = list(candidates)
    cells = limited(candidates, goals)
    ranked = [Ranked(one, missed(one, goals, scale), time_ms(one, goals, cells)) for one in candidates]
    ranked.sort(key=lambda one: (len(one.missed), one.time_ms))
    if not ranked:
        return []
    rivals = [one for one in ranked if len(one.missed) == len(ranked[0].missed)]
    if not any(row.turns_ms for one in rivals for row in one.candidate.rows.values()):
        close = [one for one in rivals if one.time_ms <= (1 + CLOSE_BEFORE) * rivals[0].time_ms]
        first = min(close, key=lambda one: one.candidate.size_bytes)
    else:
        near = [one for one in rivals if one.time_ms <= (1 + FAR) * rivals[0].time_ms]
        close = [one for one in near if _least_ratio(one, rivals[0], goals, cells) <= 1 + CLOSE]
        if goals.max_latency_ms or goals.min_throughput is None:  # else the time is a row's share of a batch
            close += [one for one in rivals if one not in close and one.time_ms - rivals[0].time_ms <= NEGLIGIBLE_MS]
        smallest = min(one.candidate.size_bytes for one in close)
        first = min((one for one in close if one.candidate.size_bytes <= (1 + SAME_SIZE) * smallest), key=_complexity)
    return [first, *(one for one in ranked if one is not first)]


def _complexity(one: Ranked) -> tuple[int, int, float]:
    """Returns the sort key of simplicity: precisions, mode, time; the least is the simplest."""
    names = one.candidate.names
    mixed = names["float_precision"] not in ("fp32", names["precision"])  # int8 whose float part is in 16 bits
    return 1 + mixed, MODES.index(names["mode"]), one.time_ms


def _least_ratio(one: Ranked, fastest: Ranked, goals: Goals, cells: Sequence[tuple[Shape, int]]) -> float:
    """Returns the lower end of the 95 % interval of how many times longer a configuration takes than the fastest one.

    Goals on other percentiles than the median, and on throughput, have no interval: the ratio itself.
    """
    exact = one.time_ms / fastest.time_ms
    if any(percentile != 50 for _, percentile in cells) or (not goals.max_latency_ms and goals.min_throughput is not None):
        return exact
    wanted = {shape for shape, _ in cells} or one.candidate.rows.keys()
    pairs = [log_ratios(one.candidate.rows[shape], fastest.candidate.rows[shape]) for shape in wanted]
    freedom = sum(len(pair) - 1 for pair in pairs)
    if any(len(pair) < 2 for pair in pairs):
        return exact
    middle = sum(sum(pair) / len(pair) for pair in pairs) / len(pairs)
    variance = sum(statistics.variance(pair) / len(pair) for pair in pairs) / len(pairs) ** 2
    return math.exp(middle - quantile(freedom) * math.sqrt(variance))


def missed(candidate: Candidate, goals: Goals, scale: Scale) -> tuple[str, ...]:
    """Returns the goals that a candidate misses, by their keys; `int8_faster` is not a property of one candidate."""
    rows = candidate.rows
    metric = known_metric(scale.metric)
    assert metric is not None, scale.metric
    slowest = min((ratio(slow, rows[shape]).value for shape, slow in scale.reference.items() if shape in rows), default=math.inf)
    judged: dict[str, Callable[[float], bool]] = {
        "max_drop": lambda limit: metric.drop(scale.before, candidate.metric) > limit + EXACT,
        "min_speedup": lambda limit: slowest < limit - EXACT,
        "max_size_mb": lambda limit: candidate.size_bytes / 1e6 > limit + EXACT,
        "min_throughput": lambda limit: _most_rows_per_s(rows) < limit - EXACT,
    }
    found = [name for name, misses in judged.items() if (limit := getattr(goals, name)) is not None and misses(limit)]
    slow = any(_exceeds(rows, goal) for goal in goals.max_latency_ms)
    return (*found, *(["max_latency_ms"] if slow else []))


def limited(candidates: Sequence[Candidate], goals: Goals) -> list[tuple[Shape, int]]:
    """Returns the cells that `goals.max_latency_ms` orders candidates by: a shape and a percentile, for each limit.

    A percentile that one of the candidates lacks is replaced by the next lower one, so that all are ordered by the same. A limit at a shape
    that was not measured, as in runs of earlier versions, orders nothing.
    """
    cells = []
    for goal in goals.max_latency_ms:
        shape = goal.batch, goal.sequence
        lower = [percentile for percentile in PERCENTILES if percentile <= goal.percentile]
        known = (percentile for percentile in lower if candidates and all(_has(one, shape, percentile) for one in candidates))
        cells += [(shape, percentile) for percentile in list(known)[:1]]
    return cells


def _has(candidate: Candidate, shape: Shape, percentile: int) -> bool:
    return shape in candidate.rows and candidate.rows[shape].percentile_ms(percentile) is not None


def _most_rows_per_s(rows: Mapping[Shape, Timing]) -> float:
    """Returns the throughput at the best shape."""
    return max((float(row.throughput_per_s) for row in rows.values() if row.throughput_per_s is not None), default=0.0)


def time_ms(candidate: Candidate, goals: Goals, cells: Sequence[tuple[Shape, int]] | None = None) -> float:
    """Returns the time that candidates are ordered by; see above.

    Args:
        candidate: A configuration.
        goals: The goals of the recipe.
        cells: Result of `limited` for all candidates; None: only for this one.
    """
    rows, cells = candidate.rows, limited([candidate], goals) if cells is None else cells
    if not goals.max_latency_ms and goals.min_throughput is not None:
        return 1e3 / _most_rows_per_s(rows)
    limited_ms = [rows[shape].percentile_ms(percentile) for shape, percentile in cells]
    times = [value for value in limited_ms if value is not None] or [row.median_ms for row in rows.values()]
    return math.exp(sum(map(math.log, times)) / len(times))


def _exceeds(rows: Mapping[Shape, Timing], goal: LatencyGoal) -> bool:
    """Whether the latency that a goal limits is above it; a percentile is, if a lower one is."""
    row = rows.get((goal.batch, goal.sequence))
    values = [] if row is None else [row.percentile_ms(percentile) for percentile in PERCENTILES if percentile <= goal.percentile]
    return any(value is not None and value > goal.value + EXACT for value in values)
