"""The samples of one engine at one shape, and the figures drawn from them on a machine with other load.

A sample is the wall time of a call, with the processor time of the engine's process and the time that its threads waited for a core
(`foundation.machine.waits`).

    undisturbed   waited <= 5 % of the wall time, or <= `OWN_WAITS_MS`
    figures       of the undisturbed samples, if there are `MIN_CLEAN` of them, of two turns at least, or if they are half of all
    estimated     otherwise: a disturbed call would have taken  min(wall, processor time / p).  p is the processor time per wall time of
                  undisturbed calls of this engine, here or at other shapes
    interval      of the median: p50 exp(+- t s / sqrt(n)) over the n turns (`foundation.measure.turns`);
                  for one turn of its order statistics
    busy          estimated, and threads waited for more than half of the time that they wanted to run; or not even an estimate is possible
                  (no processor time, another device, no undisturbed call of an engine with several threads: OpenVINO keeps its threads
                  busy for 1.3 to 1.8 of two cores, and two assumed make it a third too fast); or the half-width of the interval is over
                  `NOISY` after at least three turns

The processor time of a call does not change much when others take the cores. It includes the
spinning of an engine that waits for its own threads: that is bounded (`foundation.machine.waits.bounded_spin`). If half of the time is lost
to other load, there is no figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.measure.turns import half_width

CLEAN = 0.05
"""Share of a call that its threads may wait for a core in an undisturbed one."""
OWN_WAITS_MS = 0.4
"""Longest time for which the threads of an undisturbed call wait for each other. On a quiet machine two threads of OpenVINO wait 0.1 to
0.3 ms in a call of 0.4 ms. Other work makes a thread wait for a time slice of the kernel, which is 0.75 to 4 ms."""
MIN_CLEAN = 6
WAITED = 0.5
NOISY = 0.25
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Turn:
    """The samples of one turn, ms each."""

    wall: Floats
    cpu: Floats | None = None
    """Processor time of all threads; None where the engine does not report it, as `waited`."""
    waited: Floats | None = None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Turn:
        """Reads the answer of an engine's process: `samples_ms`, and `cpu_ms` and `waited_ms` if it reports them."""
        wall = np.asarray(answer["samples_ms"], np.float64)
        cpu, waited = answer.get("cpu_ms"), answer.get("waited_ms")
        if cpu is None or waited is None or None in waited:
            return cls(wall)
        return cls(wall, np.asarray(cpu, np.float64), np.asarray(waited, np.float64))

    @property
    def clean(self) -> NDArray[np.bool_]:
        """Which samples are undisturbed; all where the engine does not report it."""
        return np.ones(len(self.wall), bool) if self.waited is None else is_undisturbed(self.wall, self.waited)


@dataclass(frozen=True)
class Figures:
    """Figures of one cell."""

    samples: Floats
    """Measured or estimated times, ms."""
    medians: tuple[float | None, ...]
    """Median of each turn."""
    interval: tuple[float, float]
    """95 % interval of the median of all samples."""
    half: float
    """Half-width of the interval of the logarithm."""
    between: float | None
    within: float
    disturbed: float | None
    """Share of the samples taken; None where the engine does not report it."""
    estimated: bool
    busy: bool
    bounds: tuple[float, float] | None = None
    """Lower and upper bound of the median of undisturbed calls, ms; None where no processor time is reported."""

    @property
    def p50(self) -> float:
        """The median, ms."""
        return float(np.median(self.samples))


def is_undisturbed(wall_ms: Floats | float, waited_ms: Floats | float) -> NDArray[np.bool_]:
    """Returns for each call whether its threads waited only for each other."""
    return np.less_equal(waited_ms, np.maximum(np.multiply(CLEAN, wall_ms), OWN_WAITS_MS))


def enough(count: int, seconds: float, least: int, most: int, limit_s: float) -> bool:
    """Whether a block has enough samples: `most`, or at least `least` that took `limit_s` seconds together."""
    return count >= most or (count >= least and seconds >= limit_s)


def parallelism(turns: Sequence[Turn | None]) -> float | None:
    """Returns the processor time per wall time of the undisturbed samples; None where there are fewer than three."""
    known = [(one, one.cpu) for one in turns if one is not None and one.cpu is not None]
    wall = sum(float(turn.wall[turn.clean].sum()) for turn, _ in known)
    if sum(int(turn.clean.sum()) for turn, _ in known) < 3 or wall == 0:
        return None
    return sum(float(cpu[turn.clean].sum()) for turn, cpu in known) / wall


def figures(turns: Sequence[Turn | None], threads: int, elsewhere: float | None = None, *, on_cpu: bool = True) -> Figures:
    """Returns the summary of the turns of a cell.

    Args:
        turns: At least one; None for a turn that this engine did not take.
        threads: Threads of the engine.
        elsewhere: Its `parallelism` at other shapes.
        on_cpu: Whether it computes on the processor, whose time then shows what a call costs.
    """
    taken = [one for one in turns if one is not None]
    count, clean = sum(len(one.wall) for one in taken), sum(int(one.clean.sum()) for one in taken)
    is_watched = all(one.waited is not None for one in taken)
    spans = len(taken) == 1 or sum(bool(one.clean.any()) for one in taken) > 1  # a single turn may be one of a fast clock
    is_clean = (clean >= MIN_CLEAN and spans) or 2 * clean >= count
    estimable = on_cpu and is_watched
    known_spread = parallelism(taken) or elsewhere or (1.0 if threads == 1 else None)
    if is_clean:
        used: list[Floats | None] = [None if one is None else one.wall[one.clean] for one in turns]
    elif estimable:
        spread = known_spread or float(threads)
        used = [None if one is None else _estimated(one, min(float(threads), max(spread, _most_parallel(taken)))) for one in turns]
    else:
        used = [None if one is None else one.wall for one in turns]
    medians = tuple(None if one is None or not len(one) else float(np.median(one)) for one in used)
    samples = np.concatenate([one for one in used if one is not None])
    known = [one for one in medians if one is not None]
    logarithms = [math.log(one) for one in known]
    half, (low, high) = half_width(logarithms), _order_interval(samples)
    if len(known) > 1:
        low, high = float(np.median(samples)) * math.exp(-half), float(np.median(samples)) * math.exp(half)
    ends = [np.percentile(one, (25, 75)) / np.median(one) for one in used if one is not None and len(one)]
    return Figures(
        samples=samples,
        medians=medians,
        interval=(low, high),
        half=half,
        between=float(np.std(logarithms, ddof=1)) if len(known) > 1 else None,
        within=float(np.mean([third - first for first, third in ends])),
        disturbed=1 - clean / count if is_watched else None,
        estimated=not is_clean and estimable,
        busy=(not is_clean and (not estimable or known_spread is None or _waiting(taken) > WAITED)) or (len(known) >= 3 and half > NOISY),
        bounds=_bounds(taken, threads) if estimable else None,
    )


def _bounds(turns: Sequence[Turn], threads: int) -> tuple[float, float]:
    """Returns a lower and an upper bound of the median of undisturbed calls: threads at best share the work, and waiting adds time."""
    work = np.concatenate([turn.cpu for turn in turns if turn.cpu is not None])
    return float(work.min()) / threads, float(np.median(np.concatenate([turn.wall for turn in turns])))


def _estimated(turn: Turn, spread: float) -> Floats:
    assert turn.cpu is not None, "the caller has checked"
    return np.where(turn.clean, turn.wall, np.minimum(turn.wall, turn.cpu / spread))


def _most_parallel(turns: Sequence[Turn]) -> float:
    """Returns the largest processor time per wall time of any sample: a lower bound for an undisturbed call."""
    return max((float((turn.cpu / turn.wall).max()) for turn in turns if turn.cpu is not None and len(turn.wall)), default=0.0)


def _waiting(turns: Sequence[Turn]) -> float:
    """Returns the share of the threads' runnable time that they spent waiting for a core."""
    waited = sum(float(turn.waited.sum()) for turn in turns if turn.waited is not None)
    ran = sum(float(turn.cpu.sum()) for turn in turns if turn.cpu is not None)
    return waited / (waited + ran) if waited else 0.0


def _order_interval(samples: Floats) -> tuple[float, float]:
    """Returns the 95 % interval of the median from the order statistics n / 2 +- 0.98 sqrt(n)."""
    ordered, count = np.sort(samples), len(samples)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return float(ordered[low]), float(ordered[high])
