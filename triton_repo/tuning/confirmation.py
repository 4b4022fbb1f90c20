"""The winner of a search next to the settings that are already there, on measurements of their own.

The best of many noisy measurements is mostly luck: of settings that are all the same, two searches in three name others than the first. So
the search only proposes. What it proposes is measured anew, in turns with the settings that are there (A B, B A, A B, ...: a machine that
slows down, slows down both), and the difference of the rates has the interval of Student's t over the turns:

    d_t = 2 (b_t - a_t) / (b_t + a_t)      a_t, b_t: rows per second of the own and of the proposed settings in turn t
    interval = mean d +- t(0.975, T - 1) std d / sqrt(T)
    ratio = (2 + d) / (2 - d)              the same for close rates as exp of the mean of log(b / a), and d is bounded where a rate is 0

Taken is what is faster by the whole interval: of settings that are the same that happens in one search of forty. A rate is 0 where no load
was within the limit; settings that are there and never within it have no ratio, and are replaced by others that are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts import triton as documents
from foundation.measure.closeness import interval
from triton_repo.tuning.halving import Rated

P = TypeVar("P")


class Ratio(NamedTuple):
    """Ratio of two rates with the ends of its 95 % interval; None: no bound, as the other rate may be 0."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Confirmation(Generic[P]):
    """Results of the turns."""

    proposed: P
    own_rates: tuple[float, ...]
    """Rows per second of the own settings in each turn, 0 where no load was within the limit."""
    rates: tuple[float, ...]
    """Rows per second of the proposed settings in each turn."""

    @property
    def ratio(self) -> Ratio:
        """Rate of the proposed settings over the rate of the own ones."""
        mean, (low, high) = float(np.mean(self._differences)), interval(self._differences)
        return Ratio(_ratio(mean), _ratio(low), _ratio(high))

    @property
    def taken(self) -> bool:
        """Whether the proposed settings replace the own ones."""
        return interval(self._differences)[0] > 0

    @property
    def _differences(self) -> NDArray[np.float64]:
        own, new = np.array(self.own_rates), np.array(self.rates)
        both = own + new
        differences: NDArray[np.float64] = np.divide(2 * (new - own), both, out=np.zeros_like(both), where=both > 0)
        return differences

    def as_document(self) -> documents.Confirmation:
        """Returns the turns for triton.json, without the point."""
        return documents.Confirmation(
            repeats=len(self.rates),
            rows_per_s=self.rates,
            own_rows_per_s=self.own_rates,
            ratio=documents.Bounds(**self.ratio._asdict()),
            taken=self.taken,
        )


def _ratio(difference: float) -> float | None:
    return None if difference >= 2 else max(0.0, 2 + difference) / (2 - difference)


def confirm(own: P, proposed: P, measure: Callable[[P], Rated], repeats: int) -> Confirmation[P]:
    """Measures two points in turns.

    Args:
        own: The settings that are there.
        proposed: The winner of the search, another point.
        measure: Measures a point anew.
        repeats: Turns; in each both are measured, and in every second one the proposed point comes first.
    """
    rates: dict[P, list[float]] = {own: [], proposed: []}
    for turn in range(repeats):
        for point in (own, proposed)[:: 1 if turn % 2 == 0 else -1]:
            rates[point].append(measure(point).rate)
    return Confirmation(proposed, tuple(rates[own]), tuple(rates[proposed]))
