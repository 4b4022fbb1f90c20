"""The `search` section of a recipe: which settings `compress search` may change, what counts, and how much it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, JsonValue, StrictFloat, StrictInt, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from foundation.core.config import Config
from foundation.core.shown import shown

Number = StrictInt | StrictFloat
Objective = Literal["metric", "latency", "size", "throughput"]
FORMS = (
    "[0.3, 0.8] (two numbers with a decimal point) is a range; {low, high, step, log} is one too; [2, 3, 4] or {choices: [...]} are choices"
)


MOST_STEPS = 10**9
"""Steps between decimal numbers; where there are more, a range without a step draws the same."""


def decimal(number: float) -> Fraction:
    """Returns a number as its author wrote it: 0.1 is 1/10, and not the binary number next to it."""
    return Fraction(repr(number))


class Range(Config):
    """All numbers from `low` to `high`; integers where both are."""

    low: Number
    """Smallest value."""
    high: Number
    """Largest value."""
    step: Number | None = None
    """Only low, low + step, low + 2 step ... up to high, as decimal numbers; absent: every number (every integer)."""
    log: bool = False
    """Whether values are drawn by their logarithm: as often between 1.0e-5 and 1.0e-4 as between 1.0e-4 and 1.0e-3."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low} given with high: {self.high}; low must be below high")
        if isinstance(self.low, float) != isinstance(self.high, float):
            raise ValueError(f"low: {self.low} and high: {self.high} given; give two integers, or both with a decimal point")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log: true needs low above 0 and no step")
        if self.step is not None and not 0 < decimal(self.step) <= self._width:
            raise ValueError(f"step: {self.step} given; more than 0 and at most high - low = {float(self._width):g} is allowed")
        if isinstance(self.step, float) and isinstance(self.low, int):
            raise ValueError(f"step: {self.step} given with integers; give an integer")
        if self.step is not None and isinstance(self.low, float) and self.num_steps > MOST_STEPS:
            raise ValueError(
                f"step: {self.step} given, which makes {self.num_steps:.0e} steps; at most {MOST_STEPS:.0e} are allowed; leave step out"
            )
        return self

    @property
    def _width(self) -> Fraction:
        return decimal(self.high) - decimal(self.low)

    @property
    def num_steps(self) -> int:
        """Whole steps from `low` to `high`; only of a range with a step."""
        assert self.step is not None, "a range without a step has no grid"
        return self._width // decimal(self.step)

    def at(self, index: int) -> float:
        """Returns low + index * step, rounded once: the number that a recipe would give."""
        assert self.step is not None, "a range without a step has no grid"
        exact = decimal(self.low) + index * decimal(self.step)
        return float(exact) if isinstance(self.low, float) else int(exact)

    def nearest(self, number: float) -> float:
        """Returns the number of the grid next to a number, which binary steps may miss by a little."""
        assert self.step is not None, "a range without a step has no grid"
        index = round((decimal(number) - decimal(self.low)) / decimal(self.step))
        return self.at(min(max(index, 0), self.num_steps))


class Choices(Config):
    """A list of values, of which one is taken."""

    choices: Annotated[tuple[JsonValue, ...], Field(min_length=1, max_length=100)]
    """The values: numbers, words, true and false, null, or maps of settings."""

    @field_validator("choices")
    @classmethod
    def _distinct(cls, values: tuple[JsonValue, ...]) -> tuple[JsonValue, ...]:
        twice = next((value for index, value in enumerate(values) if any(same(value, other) for other in values[:index])), values)
        if twice is not values:
            raise ValueError(f"{shown(twice)} is given twice")
        return values


def same(one: object, other: object) -> bool:
    """Whether two values of YAML are the same: 1 and true are not."""
    return type(one) is type(other) and bool(one == other)


def _kind(value: object) -> str:
    if isinstance(value, Range | Choices):
        return type(value).__name__
    if isinstance(value, Mapping):
        return "Choices" if "choices" in value else "Range"
    return "Any"


def _meant(written: object) -> Range | Choices:
    """Returns the range or the choices that a list stands for.

    Raises:
        PydanticCustomError: The list could mean both, or neither.
    """
    if isinstance(written, Range | Choices):
        return written
    if not isinstance(written, list):
        raise _refused("a list of choices, or a range, is allowed")
    numbers = [value for value in written if isinstance(value, int | float) and not isinstance(value, bool)]
    floats = [value for value in numbers if isinstance(value, float)]
    if len(written) == 2 and len(floats) == 2:
        if written[0] >= written[1]:
            raise _refused("the first number of a range must be below the second")
        return Range(low=written[0], high=written[1])
    if len(written) == 2 and len(numbers) == 2 and floats:
        raise _refused("one number with a decimal point and one without may be a range or choices; say which")
    if any(isinstance(value, str) and _is_number(value) for value in written):
        raise _refused("these numbers are text to YAML; write 1.0e-5 instead of 1e-5, and no quotes")
    if not written or any(same(value, other) for index, value in enumerate(written) for other in written[:index]):
        raise _refused("each choice must be given once, and there must be one")
    return Choices(choices=written)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _refused(what: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{what}: {forms}", {"what": what, "forms": FORMS})


Values = Annotated[
    Annotated[Range, Tag("Range")] | Annotated[Choices, Tag("Choices")] | Annotated[JsonValue, Tag("Any")],
    Discriminator(_kind),
    AfterValidator(_meant),
]


class Budget(Config):
    """How much a search may take; what is used up first ends it."""

    trials: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Candidates that are looked at; most of them are dropped before they are trained in full."""
    hours: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Hours of work on candidates, of all processes and over all restarts together. The evaluation of the front comes after that. Absent:
    no limit."""


class Halving(Config):
    """How candidates are compared with each other and dropped: successive halving."""

    wave: Annotated[int, Field(ge=2, le=1000)] = 10
    """Candidates that are drawn together and compared with each other; the next wave is drawn with what these have shown."""
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a wave that stays after each comparison (quantized without training, trained for a short time); 1: all."""
    short: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the epochs of each stage that a short training takes."""


class Search(Config):
    """A search for the best settings of the stages; only `compress search` reads it; `compress run` ignores it."""

    space: Annotated[dict[str, Values], Field(min_length=1, max_length=50)]
    """Settings that may change: keys are paths as `--set` takes them, without `stages.`: `prune.sparsity`, where the stage is named by its
    id. A list of exactly two numbers with a decimal point is a range; every other list holds choices. {low, high, step, log} and {choices:
    [...]} say the same in full."""
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1)] = ("metric", "latency")
    """Objectives of the search. metric: the primary metric of the served model; latency: its time, as `target.serve` compares it; size: the
    bytes that its engine loads; throughput: rows per second at its best shape. The goals of the recipe are the constraints."""
    budget: Budget = Budget()
    """How much it may take."""
    halving: Halving = Halving()
    """How candidates are dropped before they are trained in full."""
    sampler: Literal["tpe", "nsga2"] = "tpe"
    """How candidates are drawn. tpe: tree-structured Parzen estimators (multi-objective, Ozaki et al. 2022); nsga2: a genetic algorithm
    (Deb et al. 2002), for searches of hundreds of trials."""

    def values(self) -> dict[str, Range | Choices]:
        """Returns the space; every list has become a range or choices."""
        return {path: given for path, given in self.space.items() if isinstance(given, Range | Choices)}

    @field_validator("objectives")
    @classmethod
    def _once(cls, objectives: tuple[Objective, ...]) -> tuple[Objective, ...]:
        if len(set(objectives)) < len(objectives):
            raise ValueError(f"{', '.join(objectives)} given; each objective may stand there once")
        return objectives
