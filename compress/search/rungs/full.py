"""Rung 5: the whole run, with engines: the objectives of what would be served, on selection rows, and the goals that it misses.

    metric       of the served model in its engine            latency     the time that `foundation.measure.fastest` compares, ms
    size         bytes that its engine loads                  throughput  rows per second at its best shape
    phase        geometric mean over engines and shapes of the baseline's float latency in this run / in the run of the baseline
    excess       per goal: how far beyond its limit; drops in the unit of the metric, everything else as a share of the limit

Latency is divided by the phase, and throughput multiplied by it: a machine that is slow for an hour is slow for the baseline too, which
every run times in turns with what it makes. The goals are judged on the figures of the run, as `compress run` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from compress.pipeline import run
from compress.report import goals as judged
from compress.report.model.contents import Contents, Goal
from compress.search.baseline import Baseline, float_times
from compress.search.candidate import Candidate, Record
from compress.search.rungs.rung import Rung, Verdict
from compress.search.setup import Setup
from foundation.artifacts.store import share
from foundation.core.errors import InputError
from foundation.measure.fastest import NAMES

OF_A_KIND = ("int8_faster",)
"""Goals that one candidate alone cannot meet or miss: int8 that loses is reported, and float is served."""
DROPS = ("max_drop", "max_bleu_drop")
AT_LEAST = ("min_speedup", "min_throughput")
EXACT = 1e-9


class FullRun(Rung):
    """Runs a candidate as `compress run` would; see above.

    Args:
        baseline: Its times show the phase of the machine.
    """

    NAME: ClassVar[str] = "full"
    ABOUT: ClassVar[str] = "full training, engines"

    def __init__(self, baseline: Baseline | None = None) -> None:
        self._baseline = baseline

    def measure(self, candidate: Candidate, setup: Setup) -> Record:
        """Returns `results` (the objectives), `phase`, `excess`, `missed` (goals that were not met) and `served` (what it would serve)."""
        assert self._baseline is not None, "the baseline runs first"
        folder = setup.run_folder(candidate, self.NAME)
        share(folder, setup.folder)
        report = run(self.recipe(candidate, setup), folder, progress=setup.progress_of_run(), judge="selection").contents
        phase = phase_of(report, self._baseline)
        figures = corrected(figures_of(report), phase)
        missing = [name for name in setup.search.objectives if figures[name] is None]
        if missing:
            raise InputError(f"{', '.join(missing)} of candidate {candidate.name} was not measured", "no engine of the target ran")
        excess = {}
        names = [goal.goal for goal in report.goals]
        for index, goal in enumerate(report.goals):
            if goal.goal not in OF_A_KIND and goal.value is not None:
                excess[f"{goal.goal}_{index}" if names.count(goal.goal) > 1 else str(goal.goal)] = exceeds(goal)
        missed = [str(goal.goal) for goal in report.goals if goal.met is False and goal.goal not in OF_A_KIND]
        return {"results": figures, "phase": phase, "excess": excess, "missed": missed, "served": names_of(report)}

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        """Drops nothing: who has come here has finished."""
        return {}


def names_of(report: Contents) -> dict[str, str | None]:
    """Returns the keys of the served configuration; all None if no engine was built."""
    return {name: None if report.served is None else getattr(report.served, name) for name in NAMES}


def figures_of(report: Contents) -> dict[str, float | None]:
    """Returns the objectives of what a report says is served: `metric`, `latency`, `size`, `throughput`; None where not measured."""
    ranking = () if report.served is None else report.served.ranking
    times = [row.p50_ms for row in judged.served_cells(report).values() if row.p50_ms]
    own = math.exp(sum(map(math.log, times)) / len(times)) if times else None
    return {
        "metric": judged.accuracy(report).value,
        "latency": ranking[0].time_ms if ranking else own,
        "size": judged.served_size(report),
        "throughput": judged.throughput(report).value,
    }


def phase_of(report: Contents, before: Baseline) -> float:
    """Returns how many times slower the machine was in a run than in the run of the baseline; 1 where nothing was timed in both."""
    now = float_times(judged.baseline(report).latency)
    ratios = [time / before.first_ms[key] for key, time in now.items() if key in before.first_ms]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def corrected(figures: Mapping[str, float | None], phase: float) -> dict[str, float | None]:
    """Returns objectives as they would be if the machine were as fast as it was in the run of the baseline."""
    factors = {"latency": 1 / phase, "throughput": phase}
    return {name: None if value is None else value * factors.get(name, 1) for name, value in figures.items()}


def exceeds(goal: Goal) -> float:
    """Returns by how much a judged goal is exceeded: at most 0 where it is met."""
    name, limit, value = str(goal.goal), float(goal.limit or 0), float(goal.value or 0)
    if goal.met is None:  # a model that knows nothing would meet it; among candidates it still says which loses less
        return _excess(name, limit, value)
    return min(0.0, _excess(name, limit, value)) if goal.met else max(EXACT, _excess(name, limit, value))


def _excess(name: str, limit: float, value: float) -> float:
    if name in DROPS:
        return value - limit
    return (limit - value) / limit if name in AT_LEAST else (value - limit) / limit
