"""The tiers of a cascade: which builds answer, each in its fastest engine that agrees with torch.

An engine's time is the mean time of a row at the live mix (`export.cascade.times`). The last tier is the original in fp32, in an engine.
Where the recipe names no tiers, every set of one or two faster builds is tried on selection rows. Its path is followed until other answers
exceed what the certificate rows can pass, and the fastest point counts; the set with the least time for a row is taken. Two builds
before the original have to be faster than one by more than `CLEARLY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from export.cascade.path import Seen, fastest_within, path
from export.cascade.times import Clock, mean_ms
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.timed import VariantTiming
from foundation.core.arrays import Array
from foundation.core.engines import served_on
from foundation.core.errors import InputError

CLEARLY = 0.03
MOST = 4
"""Builds before the original that are compared."""


@dataclass(frozen=True)
class Candidate:
    """A build in its fastest engine."""

    build: Build
    engine: Engine
    clock: Clock
    cost_ms: float
    """Mean time of a row at the live mix."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The configuration: variant, precision, float_precision, engine and mode."""
        return self.build.key(self.engine)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.build.variant} in {self.engine.engine} {self.engine.mode}"


def candidates(builds: Sequence[Build], latency: Sequence[VariantTiming], device: str, lengths: Array) -> list[Candidate]:
    """Returns each build in its fastest engine, in the order of export.json.

    Args:
        builds: `builds` of export.json.
        latency: The rows of latency.json.
        device: `target.device`.
        lengths: Length that each evaluation row is padded to, int64 `[n]`.
    """
    timed: dict[tuple[str, str, str, str, str], list[VariantTiming]] = {}
    for row in latency:
        timed.setdefault(row.key, []).append(row)
    found = []
    for build in builds:
        engines = [engine for engine in build.engines if engine.runnable and engine.engine in served_on(device)]
        clocks = [(engine, Clock.of(timed.get(build.key(engine), []))) for engine in engines]
        known = [Candidate(build, engine, clock, mean_ms(clock, lengths)) for engine, clock in clocks if clock is not None]
        if known:
            found.append(min(known, key=lambda one: one.cost_ms))
    return found


def original(found: Sequence[Candidate], baseline: str, key: str) -> Candidate:
    """Returns the last tier: the original in fp32.

    Args:
        found: From `candidates`.
        baseline: Id of the original.
        key: Key path of the stage, for the message.

    Raises:
        InputError: It has no engine.
    """
    own = [one for one in found if one.build.variant == baseline and one.build.precision == "fp32"]
    if not own:
        raise InputError(key, f"no engine of {baseline} in fp32 was built and timed", "the last tier is the original", "add its engine")
    return own[0]


def named(found: Sequence[Candidate], names: Sequence[str], last: Candidate, key: str) -> list[Candidate]:
    """Returns the tiers that a recipe names.

    Args:
        found: From `candidates`.
        names: Ids of variants; the last one is the original.
        last: From `original`.
        key: Key path of the setting, for messages.

    Raises:
        InputError: A variant has no engine, or the tiers are not in rising order of cost.
    """
    tiers = []
    for name in names[:-1]:
        own = [one for one in found if one.build.variant == name and one is not last]
        if not own:
            built = ", ".join(dict.fromkeys(one.build.variant for one in found))
            raise InputError(key, f"{name} given, of which no engine was built and timed", f"built: {built}", "give export.variants: all")
        tiers.append(min(own, key=lambda one: one.cost_ms))
    tiers.append(last)
    for one, other in pairwise(tiers):
        if one.cost_ms >= other.cost_ms:
            given = f"{one.title} takes {one.cost_ms:.3g} ms a row and {other.title} after it {other.cost_ms:.3g} ms"
            raise InputError(
                key, given, "tiers in rising order of cost are allowed", "give the faster one first, or leave the slower one out"
            )
    return tiers


def faster(found: Sequence[Candidate], last: Candidate, key: str) -> list[Candidate]:
    """Returns the builds that may stand before the original: the fastest ones, in rising order of cost.

    Raises:
        InputError: None is faster than the original.
    """
    own = sorted((one for one in found if one.cost_ms < last.cost_ms), key=lambda one: one.cost_ms)
    if not own:
        times = ", ".join(f"{one.title} {one.cost_ms:.3g} ms" for one in found)
        raise InputError(key, f"no model is faster than the original: {times}", remedy="add a smaller or quantized model, or leave it out")
    return own[:MOST]


def best(known: Mapping[int, tuple[Candidate, Array, Array]], last: tuple[Candidate, Array], allowed: float) -> tuple[int, ...]:
    """Returns the numbers of the builds before the original with the least time on selection rows.

    Args:
        known: By number, in rising order of cost: a candidate, its scores, float64 `[n]`, and rows with another answer, bool `[n]`.
        last: The original in its engine, and the rows that it answers otherwise than in torch.
        allowed: The share of rows with other answers that the certificate can pass.
    """

    def time_ms(chosen: tuple[int, ...]) -> float:
        some = [known[number] for number in chosen]
        costs = [*(one.cost_ms for one, _, _ in some), last[0].cost_ms]
        seen = Seen([scores for _, scores, _ in some], [*(wrong for _, _, wrong in some), last[1]], costs)
        return fastest_within(seen, path(seen), allowed)

    sets: list[tuple[int, ...]] = [*((number,) for number in known), *combinations(known, 2)]
    times = {chosen: time_ms(chosen) * (1 + CLEARLY * (len(chosen) - 1)) for chosen in sets}
    return min(times, key=lambda chosen: times[chosen])
