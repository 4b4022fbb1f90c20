"""The plan of a search: its space, its rungs, what it would cost, and the candidates that it would begin with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from compress.recipe import Recipe
from compress.report import phrases
from compress.search.baseline import recipe_of_baseline
from compress.search.candidate import Candidate
from compress.search.price import Price
from compress.search.rungs.rung import Rung
from compress.search.search import differences_from_folder, folder_of
from compress.search.setup import Setup
from compress.search.space import is_small, num_combinations, words
from compress.search.study import JOURNAL, Study
from compress.search.work import PRICED, rungs_of
from foundation.core.progress import ConsoleProgress

MOST_SHOWN = 10
HALVED = ("untrained", "short")
"""Rungs that drop by comparison."""


def describe(recipe: Recipe, out: Path | None = None) -> str:
    """Returns the plan of a search as text.

    Args:
        recipe: A checked recipe with a `search`.
        out: The search folder; default `searches/<name>`.

    Raises:
        InputError: The recipe, the space, the data or the model does not allow the search.
    """
    setup = Setup.of(recipe, folder_of(recipe, out), ConsoleProgress("quiet"))
    return "\n".join(lines(setup))


def lines(setup: Setup) -> Iterator[str]:
    """Yields the lines of the plan."""
    count = num_combinations(setup.knobs)
    yield f"search: folder {setup.folder}, {len(setup.data.selection)} selection rows to choose by"
    yield from (f"  {knob}" for knob in setup.knobs)
    yield f"  {f'{count:,} combinations' if count is not None else 'countless combinations'}; {_checked(setup)}"
    study = _study(setup)
    known = study.candidates()
    if known:
        states = [one.state for one in known]
        yield f"  the study holds {len(known)} candidates: {', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(states))}"
    first = (known or study.draw_wave())[:MOST_SHOWN]
    rungs, begun = rungs_of(setup), Price.of(setup.forecast(recipe_of_baseline(setup)))
    prices = {rung.NAME: _prices(rung, first, setup) for rung, absent in rungs.items() if absent is None and rung.NAME in PRICED}
    yield f"baseline, once for all: {_seconds(begun)}"
    share, total, unknown = 1.0, begun.seconds, set(begun.unknown)
    for rung, absent in rungs.items():
        if absent is not None:
            yield f"rung {rung.NAME:<10} left out: {absent}"
            continue
        found = prices.get(rung.NAME, [])
        yield f"rung {rung.NAME:<10} {rung.ABOUT}: {share:.0%} of a wave{_cost(found)}"
        total += share * setup.search.budget.trials * sum(price.seconds for price in found) / max(1, len(found))
        unknown.update(name for price in found for name in price.unknown)
        share *= setup.search.halving.keep if rung.NAME in HALVED else 1.0
    yield _total(setup, total, unknown)
    yield "candidates of the study:" if known else "first candidates:"
    yield from (f"  {one.name} {words(one.values)}{' (the recipe itself)' if one.own else ''}" for one in first)


def _checked(setup: Setup) -> str:
    """Returns which part of the space was checked."""
    whole = is_small(setup.knobs)
    return f"the recipe of every {'one (of a range both ends)' if whole else 'pair of values'} was checked, and every value on the model"


def _study(setup: Setup) -> Study:
    """Returns the study of the search folder where there is one of this recipe, else one in memory that draws the same."""
    exists = (setup.folder / JOURNAL).exists() and not differences_from_folder(setup)
    return Study(setup.folder if exists else None, setup.recipe, setup.knobs, setup.metric.higher_is_better)


def _prices(rung: Rung, candidates: Sequence[Candidate], setup: Setup) -> list[Price]:
    """Returns the price of a rung for each of these candidates."""
    return [Price.of(setup.forecast(rung.recipe(one, setup))) for one in candidates]


def _cost(prices: Sequence[Price]) -> str:
    """Returns the price of a rung for the cheapest and the dearest candidate."""
    if not prices:
        return ""
    seconds = sorted(price.seconds for price in prices)
    ends = dict.fromkeys(phrases.duration(value) for value in (seconds[0], seconds[-1]))
    unknown = sorted({name for price in prices for name in price.unknown})
    return f", {' to '.join(ends)} each" + (f" besides {', '.join(unknown)}" if unknown else "")


def _total(setup: Setup, seconds: float, unknown: Collection[str]) -> str:
    """Returns the price of the whole search as far as it can be predicted."""
    budget = setup.search.budget
    limit = f", at most {budget.hours:g} h of work" if budget.hours is not None else ""
    besides = f" besides {', '.join(sorted(unknown))}, of which no comparable run was recorded on this machine" if unknown else ""
    told = f"about {phrases.duration(seconds)} by prediction{besides}"
    return f"budget: {budget.trials} candidates{limit}; {told}, less what candidates share, and then the front"


def _seconds(price: Price) -> str:
    known = phrases.duration(price.seconds)
    return known if not price.unknown else f"{known} besides {', '.join(price.unknown)}"
