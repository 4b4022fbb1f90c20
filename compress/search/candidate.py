"""A candidate of a search: its values, what was measured of it on each rung, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from pydantic import JsonValue

State = Literal["open", "dropped", "finished"]


class TimedShape(TypedDict):
    """The time of an untrained shape in the fastest engine."""

    batch: int
    sequence: int | None
    engine: str
    time_ms: float
    baseline_ms: float


class Record(TypedDict, total=False):
    """What was measured of a candidate on one rung (`compress.search.rungs`)."""

    seconds: float
    """How long it took."""
    failed: str
    """Why it could not be measured."""
    macs: int
    parameters: int
    weight_bytes: int
    predicted_seconds: float | None
    relative: float
    shapes: list[TimedShape]
    metric: float
    told: bool
    results: dict[str, float | None]
    phase: float
    excess: dict[str, float]
    missed: list[str]
    served: dict[str, str | None]


@dataclass(frozen=True)
class Dropped:
    """Why a candidate went no further."""

    rung: str
    reason: str
    for_time: bool = False
    """Whether the hours that were left did not do for it: with more of them it continues."""


@dataclass(frozen=True)
class Candidate:
    """One trial of the study."""

    number: int
    wave: int
    """Candidates of one wave were drawn together, and are compared with each other."""
    values: Mapping[str, JsonValue]
    """The value of each knob by its path."""
    own: bool = False
    """Whether these are the values of the recipe itself."""
    records: Mapping[str, Record] = field(default_factory=dict)
    """What was measured on each rung."""
    passed: tuple[str, ...] = ()
    """The rungs that it has passed."""
    dropped: Dropped | None = None
    results: tuple[float, ...] | None = None
    """The objectives of a finished candidate, in the order of the recipe."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.number:04d}"

    @property
    def state(self) -> State:
        """open: it is not decided yet."""
        return "dropped" if self.dropped else "finished" if self.results is not None else "open"

    @property
    def seconds(self) -> float:
        """The time that it has taken."""
        return sum(record.get("seconds", 0.0) for record in self.records.values())

    @property
    def excess(self) -> dict[str, float]:
        """Excess over each goal of the recipe, at most 0 where it meets the goal; empty before it has finished."""
        return dict(self.records.get("full", Record()).get("excess", {}))

    @property
    def feasible(self) -> bool:
        """Whether it has finished and meets the goals."""
        return self.results is not None and all(value <= 0 for value in self.excess.values())
