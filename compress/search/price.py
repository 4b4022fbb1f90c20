"""The price of a candidate: what the store does not hold yet.

    price = sum of the predicted seconds of the steps that are not cached        (`compress.forecast`)

Steps that other candidates have made cost nothing, so a candidate that shares a long beginning is cheap. Where a step has no comparable run
on this machine, its seconds are unknown, and prices are compared by the work of the steps in multiply-accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.forecast import PlannedStep


@dataclass(frozen=True)
class Price:
    """Cost of the remaining work."""

    seconds: float
    """Sum over the steps whose time can be predicted."""
    work: float
    """Multiply-accumulates of all steps that are not cached."""
    unknown: tuple[str, ...] = ()
    """Ids of the steps whose time cannot be predicted."""

    @classmethod
    def of(cls, steps: Sequence[PlannedStep]) -> Price:
        """Returns the price of a run."""
        todo = [step for step in steps if step.cached is None]
        known = [step.seconds for step in todo if step.seconds is not None]
        unknown = tuple(str(step.step.id) for step in todo if step.seconds is None)
        return cls(sum(known), sum(step.work for step in todo), unknown)

    @property
    def whole_seconds(self) -> float | None:
        """The seconds; None where a step is unknown."""
        return None if self.unknown else self.seconds


def cheapest_first(prices: dict[int, Price]) -> list[int]:
    """Returns the candidates by rising price: in seconds where all are known, else by their work; then by number."""
    known = all(price.whole_seconds is not None for price in prices.values())
    return sorted(prices, key=lambda number: (prices[number].seconds if known else prices[number].work, number))
