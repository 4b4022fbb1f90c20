"""The space of a search: what may change in a recipe, and the recipe that a draw of values makes.

A knob is a key path and its values (`compress.search_settings`). Numbers are drawn as numbers. A list of numbers is drawn as places in its
order, so that the sampler knows that 3 lies between 2 and 4. Everything else is a category, stored as JSON. A range with a step holds
decimal numbers, those that a recipe would give: Optuna adds up binary steps (0.1 + 2 * 0.1 is 0.30000000000000004), so each draw is rounded
to the grid. Only settings of stages may change: model, data, target and goals are what candidates are compared under.

Before anything runs, the recipe of every combination is checked; of a space with more than `MOST_COMBINATIONS` (a range counts with its two
ends) every pair of values. Each candidate is checked once more, against the model, before it costs anything.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import JsonValue

from compress.recipe import Recipe, check, written
from compress.recipe_file import put
from compress.search_settings import Choices, Range, Search, same
from foundation.core.errors import InputError, Problem, nearest
from foundation.core.named import one_of
from foundation.core.shown import shown

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MOST_COMBINATIONS = 512
MOST_COUNTED = 10_000
"""Largest number of combinations of which the untried ones are listed."""
Values = dict[str, JsonValue]
"""The value of each knob by its path."""


@dataclass(frozen=True)
class Knob:
    """One setting that may change."""

    path: str
    """As in the recipe: `prune.sparsity`."""
    domain: Range | Choices

    @property
    def stage(self) -> str:
        """Id of the stage that it belongs to."""
        return self.path.split(".")[0]

    @property
    def choices(self) -> tuple[JsonValue, ...] | None:
        """The values, numbers in rising order; None for a range."""
        if isinstance(self.domain, Range):
            return None
        if not self._numeric:
            return self.domain.choices
        numbers = sorted(value for value in self.domain.choices if _is_number(value))
        return tuple(numbers)

    @property
    def _numeric(self) -> bool:
        return isinstance(self.domain, Choices) and all(_is_number(value) for value in self.domain.choices)

    @property
    def distribution(self) -> BaseDistribution:
        """Distribution that the sampler draws from."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices is not None:
            if self._numeric:
                return IntDistribution(0, len(self.choices) - 1)
            return CategoricalDistribution([json.dumps(value, sort_keys=True) for value in self.choices])
        given = self._range
        low, step = given.low, given.step
        high = given.high if step is None else given.at(given.num_steps)
        if isinstance(low, int):
            return IntDistribution(low, int(high), log=given.log, step=1 if step is None else int(step))
        return FloatDistribution(low, float(high), log=given.log, step=None if step is None else float(step))

    @property
    def _range(self) -> Range:
        assert isinstance(self.domain, Range), "choices are drawn as places or categories"
        return self.domain

    def exact(self, value: JsonValue) -> JsonValue:
        """Returns the number of a stepped range next to a value; without a step, and of choices, the value itself."""
        if isinstance(self.domain, Choices) or self.domain.step is None:
            return value
        assert _is_number(value), f"a range has numbers: {value!r}"
        return self.domain.nearest(value)

    def value(self, drawn: float | str) -> JsonValue:
        """Returns the value in the recipe of what the sampler drew."""
        if self.choices is None:
            return self.exact(drawn)
        if not isinstance(drawn, str):
            return self.choices[int(drawn)]
        category: JsonValue = json.loads(drawn)
        return category

    def drawn(self, value: object) -> float | str | None:
        """Returns the sampler's representation of a value; None where the value is outside the space."""
        if self.choices is not None:
            found = next((index for index, other in enumerate(self.choices) if same(value, other) or _equal(value, other)), None)
            return found if found is None or self._numeric else json.dumps(self.choices[found], sort_keys=True)
        if not _is_number(value):
            return None
        low, high = self._range.low, self._range.high
        number = float(value) if isinstance(low, float) else value
        return number if type(number) is type(low) and low <= number <= high and number == self.exact(number) else None

    @property
    def samples(self) -> tuple[JsonValue, ...]:
        """Every value of choices; the two ends of a range."""
        distribution: Any = self.distribution
        return self.choices if self.choices is not None else (distribution.low, distribution.high)

    @property
    def count(self) -> int | None:
        """How many values there are; None for a range of real numbers."""
        if self.choices is not None:
            return len(self.choices)
        if self._range.step is None:
            return None if isinstance(self._range.low, float) else int(self._range.high) - int(self._range.low) + 1
        return self._range.num_steps + 1

    @property
    def all(self) -> tuple[JsonValue, ...]:
        """Every value; only where `count` is known."""
        if self.choices is not None:
            return self.choices
        if self._range.step is None:
            return tuple(range(int(self._range.low), int(self._range.high) + 1))
        return tuple(self._range.at(index) for index in range(self.count or 0))

    def __str__(self) -> str:
        """The knob in one line."""
        if self.choices is not None:
            return f"{self.path}: one of {', '.join(json.dumps(value) for value in self.choices)}"
        step, log = self._range.step, self._range.log
        how = f", in steps of {step:g}" if step is not None else ", by its logarithm" if log else ""
        return f"{self.path}: {self._range.low:g} to {self._range.high:g}{how}"


def knobs_of(recipe: Recipe) -> tuple[Knob, ...]:
    """Returns the knobs of a recipe, in order, after every combination of their values was checked.

    Raises:
        InputError: The recipe has no `search`, a path does not exist, or a stage refuses a value.
    """
    if recipe.search is None:
        raise InputError("search", "missing", remedy="give what may change, such as `search: {space: {prune.sparsity: [0.3, 0.8]}}`")
    ids, problems = [str(stage.id) for stage in recipe.stages], []
    for path in recipe.search.space:
        stage, _, rest = path.removeprefix("stages.").partition(".")
        if stage not in ids or not all(rest.split(".")):
            problems.append(
                Problem(
                    f"search.space.{path}",
                    "no setting of a stage",
                    remedy=(
                        f"give STAGE.KEY, where STAGE is {one_of(ids)}{nearest(stage, ids)}; model, data, target and goals "
                        "are what candidates are compared under"
                    ),
                )
            )
    found = tuple(Knob(path.removeprefix("stages."), given) for path, given in recipe.search.values().items())
    twice = [knob.path for index, knob in enumerate(found) if knob.path in [other.path for other in found[:index]]]
    problems += [Problem(f"search.space.stages.{path}", "also given without `stages.`", remedy="leave one of them out") for path in twice]
    if problems:
        raise InputError.of(problems)
    base = written(recipe)
    refused: dict[Problem, Values] = {}
    for values in combinations(found):
        try:
            recipe_of(base, values)
        except InputError as error:
            for problem in error.problems:
                refused.setdefault(problem, values)
    if refused:
        raise InputError.of(problem.within(f"search.space: with {words(values)}") for problem, values in refused.items())
    return found


def combinations(knobs: Sequence[Knob]) -> Iterator[Values]:
    """Yields combinations of values: all of them (of a range its ends) where there are few enough, else one for every pair of values."""
    samples = {knob.path: knob.samples for knob in knobs}
    if is_small(knobs):
        for values in itertools.product(*samples.values()):
            yield dict(zip(samples, values, strict=True))
        return
    first = {path: values[0] for path, values in samples.items()}
    for one, other in itertools.combinations(samples, 2):
        for value, second in itertools.product(samples[one], samples[other]):
            yield {**first, one: value, other: second}


def is_small(knobs: Sequence[Knob]) -> bool:
    """Whether every combination is checked, and not only every pair of values."""
    return math.prod(len(knob.samples) for knob in knobs) <= MOST_COMBINATIONS


def each_value(knobs: Sequence[Knob]) -> Iterator[Values]:
    """Yields for every value of every knob one combination that has it."""
    first = {knob.path: knob.samples[0] for knob in knobs}
    yield first
    for knob in knobs:
        for value in knob.samples[1:]:
            yield {**first, knob.path: value}


def recipe_of(base: Mapping[str, object], values: Mapping[str, object], name: str | None = None) -> Recipe:
    """Returns the recipe that a draw makes, checked and without its `search`.

    Args:
        base: The recipe as plain data (`compress.recipe.written`).
        values: The value of each knob.
        name: Its name; absent: the name of the base.

    Raises:
        InputError: A stage refuses a value, or values do not go together.
    """
    return check(plain_of(base, values, name))


def plain_of(base: Mapping[str, object], values: Mapping[str, object], name: str | None = None) -> dict[str, object]:
    """Returns the recipe that a draw makes as plain data; see `recipe_of`."""
    raw = {key: value for key, value in deepcopy(dict(base)).items() if key != "search"}
    for path, value in values.items():
        put(raw, ["stages", *path.split(".")], deepcopy(value), f"search.space.{path}")
    return {**raw, "name": name or raw["name"]}


def own_values(recipe: Recipe, knobs: Sequence[Knob]) -> Values | None:
    """Returns the values that the recipe itself gives to the knobs; None where it leaves the space with one of them."""
    values: Values = {}
    for knob in knobs:
        value: object = recipe.stage(knob.stage).model_dump(mode="json")
        for part in knob.path.split(".")[1:]:
            value = value.get(part) if isinstance(value, Mapping) else None
        drawn = knob.drawn(value)
        if drawn is None:
            return None
        values[knob.path] = knob.value(drawn)
    return values


def num_combinations(knobs: Sequence[Knob]) -> int | None:
    """Returns how many combinations the space has; None where a range makes them countless."""
    counts = [knob.count for knob in knobs]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def untried(knobs: Sequence[Knob], tried: Sequence[Values]) -> Iterator[Values]:
    """Yields the combinations of a space of at most `MOST_COUNTED` ones that are not among those tried."""
    known = {json.dumps(values, sort_keys=True) for values in tried}
    for values in itertools.product(*(knob.all for knob in knobs)):
        found = dict(zip((knob.path for knob in knobs), values, strict=True))
        if json.dumps(found, sort_keys=True) not in known:
            yield found


def words(values: Mapping[str, object]) -> str:
    """Returns values as text: `prune.sparsity=0.5, quantize.mode=ptq`."""
    return ", ".join(f"{path}={_short(value)}" for path, value in values.items())


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value) if not isinstance(value, dict) else shown(value)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(value: object, other: object) -> bool:
    """Whether two numbers are equal, 3 and 3.0 too."""
    return _is_number(value) and _is_number(other) and value == other


def searched(search: Search) -> dict[str, object]:
    """Returns what makes one study: everything but its budget, plain data."""
    return search.model_dump(mode="json", exclude={"budget"})
