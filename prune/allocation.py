"""Allocation: how many heads, FFN neurons and experts each block keeps within a budget.

A component is the heads, FFN neurons or experts of one block: n units of cost c each, kept in steps (of `multiple_of` neurons), at least
`least` of them; a protected one keeps all. If k units do not cost k c (latency), `prices` holds the cost of each count.

    uniform      the same share r of every component: the largest r whose counts fit
    global       units with the lowest score per cost go first, across all blocks; a step that saves no cost is merged with the next one
    sensitivity  min sum_i D_i(k_i)   subject to   sum_i c_i k_i <= budget        D_i(k): distance with k units kept (`prune.sensitivity`)

`sensitivity` is a multiple-choice knapsack, solved by dynamic programming over a budget of `STEPS` steps. Costs are rounded up, so every
solution fits (Frantar and Alistarh 2022, https://arxiv.org/abs/2201.13096, section 3.2). Limitations: components are treated as
independent of each other.
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
    """The heads, FFN neurons or experts of one block."""

    block: int
    component: Component
    size: int
    """Number of units."""
    cost: float
    """Cost of one unit."""
    incoming_size: int
    """Number of units in the incoming model, which shares refer to."""
    step: int = 1
    """Units are kept in multiples of this, or all of them."""
    least: int = 1
    """Fewest units to keep."""
    protected: bool = False
    """Whether all units are kept."""
    prices: tuple[float, ...] = ()
    """Cost of 0, 1, 2, ... units, ascending; empty if k units cost k times `cost`."""

    def price(self, count: int) -> float:
        """Returns the cost of `count` units."""
        return self.prices[count] if self.prices else self.cost * count

    def saved(self, count: int, fewer: int) -> float:
        """Returns the cost saved by keeping `fewer` instead of `count` units."""
        return self.prices[count] - self.prices[fewer] if self.prices else self.cost * (count - fewer)

    def counts(self) -> list[int]:
        """Returns every allowed number of units, descending, starting with all."""
        if self.protected:
            return [self.size]
        lowest = min(self.size, math.ceil(self.least / self.step) * self.step)
        return sorted({self.size, *range(lowest, self.size, self.step)}, reverse=True)


Counts = Mapping[Part, int]


def cheapest(parts: Sequence[Part]) -> float:
    """Returns the lowest possible cost."""
    return sum(part.price(part.counts()[-1]) for part in parts)


def uniform(parts: Sequence[Part], budget: float) -> Counts:
    """Returns the counts for the largest common share that fits; the lowest counts if none fits."""

    def at(share: float) -> dict[Part, int]:
        return {part: min(part.counts(), key=lambda count: (abs(count - share * part.incoming_size), -count)) for part in parts}

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
    """Removes the units with the lowest score per cost until the others fit; returns the counts.

    Args:
        parts: The components.
        scores: Scores of the units by component, float `[n]`, at least 0 and comparable between components.
        budget: Cost that may remain.
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
            ratio = max(ratio, step.ratio)  # ratios ascend; keep that despite rounding errors
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
    """Returns an allocation that removes the units with the lowest scores, whatever their cost.

    Args:
        scores: Scores by block and component, float `[n]`, at least 0 and comparable between components.
    """
    return lambda parts, budget: by_score(parts, {part: scores[part.block, part.component] * part.cost for part in parts}, budget)


@dataclass(frozen=True)
class _Step:
    """Units of a component that are removed together."""

    position: int
    """Index of the count that remains, in `Part.counts()`."""
    units: int
    score: float
    """Mean score of these units."""
    saved: float

    @property
    def ratio(self) -> float:
        return self.score / (self.saved / self.units) if self.saved > 0 else math.inf

    def with_next(self, later: _Step) -> _Step:
        units = self.units + later.units
        mean = (self.units * self.score + later.units * later.score) / units
        return _Step(later.position, units, mean, self.saved + later.saved)


def by_distance(parts: Sequence[Part], distance: Callable[[Part, int], float], budget: float) -> Counts:
    """Returns the counts with the least total distance that fit; the lowest counts if none fit.

    Args:
        parts: The components.
        distance: Distance of the outputs with so many units of a component kept, and all other components unpruned.
        budget: Cost that may remain.
    """
    lowest = cheapest(parts)
    room = budget - lowest
    if room / STEPS < sys.float_info.min:  # no room, or so little that a step of it would underflow
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
    """Returns the indices of the `number` largest scores, ascending; ties go to the lowest index."""
    found: list[int] = torch.sort(scores, descending=True, stable=True).indices[:number].sort().values.tolist()
    return found
