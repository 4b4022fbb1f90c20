"""Allocation: how many heads, neurons and experts each block keeps, so that all of them together cost no more than a budget.

A component is the heads, the neurons or the experts of one block: n units of cost c, to be kept in steps (of `multiple_of` neurons),
`least` of them at the least; a protected one is kept whole. Where k units do not cost k c (milliseconds), `prices` says what they do.

    uniform      the same share r of every component: the largest r whose counts fit
    global       the units with the lowest score per cost go first, whatever block they are in; a step that saves nothing goes with the next
    sensitivity  min sum_i D_i(k_i)   subject to   sum_i c_i k_i <= budget        D_i(k): distance with k units kept (`prune.sensitivity`)

`sensitivity` is a multiple-choice knapsack, solved by dynamic programming over the budget in `STEPS` steps, costs rounded up: what fits
there fits (Frantar and Alistarh 2022, https://arxiv.org/abs/2201.13096, section 3.2). Left out: the effect of components on each other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prune.cost import Component

STEPS = 2000


@dataclass(frozen=True)
class Part:
    """The heads, neurons or experts of one block."""

    block: int
    what: Component
    size: int
    """Units that there are."""
    cost: float
    """Of one unit."""
    whole: int
    """Units that there were before anything was pruned: what a share is taken of."""
    step: int = 1
    """Units are kept in multiples of it, or all."""
    least: int = 1
    """Units that are kept at the least."""
    protected: bool = False
    """Whether it is kept whole."""
    prices: tuple[float, ...] = ()
    """What 0, 1, ... units cost, ascending, where that is not a multiple of `cost`."""

    def price(self, count: int) -> float:
        """Returns what so many units cost."""
        return self.prices[count] if self.prices else self.cost * count

    def saved(self, count: int, fewer: int) -> float:
        """Returns how much less fewer units cost."""
        return self.prices[count] - self.prices[fewer] if self.prices else self.cost * (count - fewer)

    def counts(self) -> list[int]:
        """Returns every number of units that may be kept, descending, from all."""
        if self.protected:
            return [self.size]
        lowest = min(self.size, math.ceil(self.least / self.step) * self.step)
        return sorted({self.size, *range(lowest, self.size, self.step)}, reverse=True)


Counts = Mapping[Part, int]


def cheapest(parts: Sequence[Part]) -> float:
    """Returns the lowest cost that there is."""
    return sum(part.price(part.counts()[-1]) for part in parts)


def uniform(parts: Sequence[Part], budget: float) -> Counts:
    """Returns the counts of the largest common share that fits; the lowest ones where none does."""

    def at(share: float) -> dict[Part, int]:
        return {part: min(part.counts(), key=lambda count: (abs(count - share * part.whole), -count)) for part in parts}

    def fits(counts: Counts) -> bool:
        return sum(part.price(count) for part, count in counts.items()) <= budget * (1 + 1e-12)

    if fits(at(1.0)):
        return at(1.0)
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(at(middle)) else (low, middle)
    return at(low)


def by_score(parts: Sequence[Part], scores: Mapping[Part, Tensor], budget: float) -> Counts:
    """Returns the counts that are left when the units with the lowest score per cost go first, until the rest fits.

    Args:
        parts: The components.
        scores: Of the units of each, float `[n]`, at least 0 and comparable with each other.
        budget: What the rest may cost.
    """
    pieces: list[tuple[float, int, int]] = []
    for number, part in enumerate(parts):
        counts = part.counts()
        ascending = scores[part].double().sort().values
        steps: list[_Step] = []
        for position, fewer in enumerate(counts[1:], 1):
            gone = ascending[part.size - counts[position - 1] : part.size - fewer]
            steps.append(_Step(position, len(gone), float(gone.mean()), part.saved(counts[position - 1], fewer)))
            while len(steps) > 1 and steps[-1].ratio < steps[-2].ratio * (1 - 1e-9):
                later, earlier = steps.pop(), steps.pop()
                steps.append(earlier.with_next(later))
        ratio = 0.0
        for step in steps:
            ratio = max(ratio, step.ratio)  # it ascends; rounding must not tell otherwise
            pieces.append((ratio, number, step.position))
    position_of = [0] * len(parts)
    cost = sum(part.price(part.size) for part in parts)
    for ratio, number, position in sorted(pieces):
        if cost <= budget * (1 + 1e-12) or math.isinf(ratio):
            break
        part, counts = parts[number], parts[number].counts()
        cost -= part.saved(counts[position_of[number]], counts[position])
        position_of[number] = position
    return {part: part.counts()[position] for part, position in zip(parts, position_of, strict=True)}


def by_worth(scores: Mapping[tuple[int, Component], Tensor]) -> Callable[[Sequence[Part], float], Counts]:
    """Returns an allocation by scores that are comparable as they are: one that cuts the lowest, whatever a unit costs on average.

    Args:
        scores: By block and component, float `[n]`, at least 0.
    """
    return lambda parts, budget: by_score(parts, {part: scores[part.block, part.what] * part.cost for part in parts}, budget)


@dataclass(frozen=True)
class _Step:
    """Units of a component that go together."""

    position: int
    """Of what is left, in the counts of the component."""
    units: int
    score: float
    """The mean of theirs."""
    saved: float

    @property
    def ratio(self) -> float:
        return self.score / (self.saved / self.units) if self.saved > 0 else math.inf

    def with_next(self, later: _Step) -> _Step:
        units = self.units + later.units
        mean = (self.units * self.score + later.units * later.score) / units
        return _Step(later.position, units, mean, self.saved + later.saved)


def by_distance(parts: Sequence[Part], distance: Callable[[Part, int], float], budget: float) -> Counts:
    """Returns the counts of the least total distance that fit; the lowest ones where none do.

    Args:
        parts: The components.
        distance: What it costs in accuracy to keep so many units of a component, all others whole.
        budget: What the rest may cost.
    """
    lowest = cheapest(parts)
    room = budget - lowest
    if room / STEPS < sys.float_info.min:  # no room, or so little that no step of it is a number
        return {part: part.counts()[-1] for part in parts}
    unit = room / STEPS
    best = np.zeros(STEPS + 1)
    choices: list[np.ndarray] = []
    for part in parts:
        counts = part.counts()
        found, chosen = np.full(STEPS + 1, np.inf), np.zeros(STEPS + 1, np.int64)
        for number, count in enumerate(counts):
            steps = math.ceil(part.saved(count, counts[-1]) / unit - 1e-9)
            if steps > STEPS:
                continue
            candidate = np.full(STEPS + 1, np.inf)
            candidate[steps:] = best[: STEPS + 1 - steps] + distance(part, count)
            better = candidate < found
            found[better], chosen[better] = candidate[better], number
        best = found
        choices.append(chosen)
    left, counted = STEPS, {}
    for part, chosen in reversed(list(zip(parts, choices, strict=True))):
        counts = part.counts()
        counted[part] = counts[chosen[left]]
        left -= math.ceil(part.saved(counted[part], counts[-1]) / unit - 1e-9)
    return {part: counted[part] for part in parts}


def top(scores: Tensor, number: int) -> list[int]:
    """Returns the indices of the largest scores, ascending; of equal ones the lowest indices."""
    found: list[int] = torch.sort(scores, descending=True, stable=True).indices[:number].sort().values.tolist()
    return found
