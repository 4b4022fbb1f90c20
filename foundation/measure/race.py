"""Selects the engines that are still worth timing: successive halving over the turns of `foundation.measure.latency`.

    after a turn   an engine leaves if another one is faster at every shape, and by the geometric mean of the ratios faster by
                   `MARGINS[turn]`, the 95 % interval of that mean being above it
    busy           an engine with a busy figure leaves if at every shape its least possible time exceeds the other engine's time on the
                   busy machine by `MARGINS[0]`. The least possible time is the processor time divided by the threads
    stays          whatever is `always` timed, such as the reference in torch, and of every group the fastest. A group has one model in one
                   precision, so that a choice by accuracy has a well-timed engine too. It leaves nevertheless if the fastest of the
                   same model in the next wider precision beats it, as bfloat16 loses on a processor without it: what is narrower and
                   slower wins nothing

Ratios are formed within turns. After one turn the interval takes the order statistics of both medians, and `TURN_NOISE` for what a second
turn would differ by. What has left keeps the samples of its turns, with their n and interval, and can still be chosen.

Source of the idea: K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016. There half of
the arms leave in every round; here none leaves whose interval still reaches the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foundation.measure.samples import Figures
from foundation.measure.turns import quantile

Shape = tuple[int, int | None]
MARGINS = (0.25, 0.1)
"""How much slower an engine has to be to drop out, after the first and the second turn."""
TURN_NOISE = 0.05
"""Standard deviation of medians between turns that is reckoned with after one turn."""
P99_SAMPLES, P99_SECONDS = 200, 3.0


@dataclass(frozen=True)
class Block:
    """How many samples a block takes: `most`, or at least `least` that take `seconds` together."""

    least: int
    most: int
    seconds: float

    def at(self, needs_p99: bool) -> Block:
        """Returns the block for a shape; where a goal limits its p99, all turns together take 200 samples."""
        return replace(self, most=max(self.most, P99_SAMPLES // 3 + 1), seconds=P99_SECONDS / 3) if needs_p99 else self


BLOCKS = (Block(3, 30, 0.12), Block(3, 60, 0.25), Block(3, 140, 0.4))
"""The blocks of the turns."""


@dataclass(frozen=True)
class Rival:
    """Facts about an engine besides its times."""

    group: str
    """Groups whose fastest engine is timed to the end."""
    always: bool = False
    """Whether it is timed to the end in any case."""
    wider: str | None = None
    """Group of the same model in a wider precision; None for the widest."""


@dataclass(frozen=True)
class Race:
    """The engines that compete, in the order of the jobs."""

    rivals: Sequence[Rival]
    p99: frozenset[Shape] = frozenset()
    """Shapes at which a goal limits the p99."""

    def needs_p99(self, shape: Shape) -> bool:
        """Whether a goal limits the p99 at a shape."""
        return shape in self.p99

    def staying(self, live: Sequence[int], figures: Mapping[int, Mapping[Shape, Figures]]) -> list[int]:
        """Returns the engines that take another turn.

        Args:
            live: Those that took this one.
            figures: What their cells are worth so far.
        """
        times = {index: float(np.mean([math.log(cell.p50) for cell in figures[index].values()])) for index in live}
        leaders = {group: min((i for i in live if self.rivals[i].group == group), key=lambda i: times[i]) for group in self._groups(live)}
        stay = [one for one in leaders.values() if not self._loses_to_wider(one, leaders, figures)]
        kept = {index for index in live if self.rivals[index].always} | set(stay)
        return [index for index in live if index in kept or not any(_beats(one, index, figures) for one in leaders.values())]

    def _loses_to_wider(self, index: int, leaders: Mapping[str, int], figures: Mapping[int, Mapping[Shape, Figures]]) -> bool:
        """Whether the fastest engine of a group is slower than the fastest one of the same model in a wider precision."""
        wider = leaders.get(self.rivals[index].wider or "")
        return wider is not None and _beats(wider, index, figures)

    def _groups(self, live: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(self.rivals[index].group for index in live))


def _beats(one: int, other: int, figures: Mapping[int, Mapping[Shape, Figures]]) -> bool:
    """Whether an engine is so much faster than another one that this can win nothing any more."""
    cells = [(figures[one][shape], slow) for shape, slow in figures[other].items()]
    gaps = [(math.log(slow.p50 / fast.p50), _variance(fast, slow)) for fast, slow in cells]
    turns = min(len([one for one in slow.medians if one is not None]) for _, slow in cells)
    if any(fast.busy or slow.busy for fast, slow in cells):
        return all(_is_apart(fast, slow) for fast, slow in cells)
    if any(gap <= 0 for gap, _ in gaps):
        return False
    middle, error = float(np.mean([gap for gap, _ in gaps])), math.sqrt(sum(variance for _, variance in gaps)) / len(gaps)
    reach = 1.96 if turns < 2 else quantile(len(gaps) * (turns - 1))
    return middle - reach * error > math.log1p(MARGINS[min(turns, len(MARGINS)) - 1])


def _is_apart(fast: Figures, slow: Figures) -> bool:
    """Whether an engine is faster than another one, however busy the machine was."""
    return fast.bounds is not None and slow.bounds is not None and slow.bounds[0] > (1 + MARGINS[0]) * fast.bounds[1]


def _variance(fast: Figures, slow: Figures) -> float:
    """Returns the variance of the logarithm of a ratio of medians."""
    pairs = [math.log(b / a) for a, b in zip(fast.medians, slow.medians, strict=False) if a is not None and b is not None]
    if len(pairs) > 1:
        return float(np.var(pairs, ddof=1)) / len(pairs)
    ends = [math.log(high / low) / (2 * 1.96) for low, high in (fast.interval, slow.interval)]
    return sum(end**2 for end in ends) + 2 * TURN_NOISE**2
