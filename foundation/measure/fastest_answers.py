"""Chooses the engine that serves a language model: among engines that answer prompts, one with clearly more tokens per second.

    rate      geometric mean over the loads of tokens per second (`foundation.measure.generation`), so that none outweighs another
    served    the first engine of the target, unless another misses no more goals and has `CLEARLY` more

An engine competes with its recommended mode. The goal that counts is `max_drop`: an engine that rounds more may be faster and
worse. Every build is served, so the choice is made for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundation.artifacts.document import read
from foundation.artifacts.exported import Build, Engine, Exported
from foundation.artifacts.timed import VariantSpeed, read_generated
from foundation.core.engines import ENGINES
from foundation.core.goals import Goals
from foundation.core.target import Target
from foundation.measure.fastest import EXACT, EXPORTED
from foundation.measure.metrics import METRICS

CLEARLY = 0.1
"""Relative speed by which an engine has to beat the first one."""


def engines_that_answer(
    exported: Path, latency: Path | None, target: Target, goals: Goals, scale: tuple[str, float] | None, *, proposed: bool = False
) -> dict[str, tuple[str, ...]]:
    """Returns the engines of each build that answer prompts on the CPU, by the build's folder, the one to serve first.

    Args:
        exported: Folder of export.json.
        latency: Folder of generation.json; None where nothing was timed.
        target: Its engines are in order of preference; `serve: first` keeps it.
        goals: The goals of the recipe.
        scale: Name of the primary metric, and its value for the baseline in torch; None where it is not known.
        proposed: Whether tokens are proposed to the served model: engines that take no proposals then come last.
    """
    rows = () if latency is None else read_generated(latency).rows
    found = {}
    for build in read(Exported, exported / EXPORTED).builds:
        entries: dict[str, Engine] = {}
        for entry in build.engines:
            if entry.runnable and ENGINES[entry.engine].generates and ENGINES[entry.engine].serves == "cpu":
                entries.setdefault(entry.engine, entry)
        order = list(entries)  # the order of the target, in which export.json lists them
        rates = {name: rate(rows, build, entry) for name, entry in entries.items()} if target.serve == "fastest" else {}
        misses = {name: _misses(entry, goals, scale) for name, entry in entries.items()}
        fastest = _fastest_first(order, rates, misses)
        found[build.folder] = tuple(sorted(fastest, key=lambda name: proposed and not ENGINES[name].proposed_to))
    return found


def rate(rows: Sequence[VariantSpeed], build: Build, entry: Engine) -> float | None:
    """Returns the rate of an engine of a build; None where it was not timed."""
    found = [float(row.tokens_per_s) for row in rows if row.key == build.key(entry)]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def _misses(entry: Engine, goals: Goals, scale: tuple[str, float] | None) -> bool:
    """Whether an engine loses more than `goals.max_drop`."""
    if goals.max_drop is None or scale is None:
        return False
    metric, before = scale
    return METRICS[metric].drop(before, entry.figures[metric]) > goals.max_drop + EXACT


def _fastest_first(order: Sequence[str], rates: Mapping[str, float | None], misses: Mapping[str, bool]) -> list[str]:
    """Returns engines, the one to serve first, the others in their order."""
    chosen = order[0] if order else None
    for name in order[1:]:
        mine, other = rates.get(name), rates.get(str(chosen))
        if mine is None or other is None or misses[name] > misses[str(chosen)]:
            continue
        if misses[name] < misses[str(chosen)] or mine > (1 + CLEARLY) * other:
            chosen = name
    return [] if chosen is None else [chosen, *(name for name in order if name != chosen)]
