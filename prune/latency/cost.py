"""Latency cost: the cost of the blocks in milliseconds, read from a measured table (`prune.latency.table`).

It implements `prune.cost.CostModel`, so that allocations and learned masks can work on latency as they do on MACs or parameters.
Limitations: the table has no hidden channels and no experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from foundation.models.architecture.structure import Sizes, Structure
from prune.cost import Component, count_of
from prune.latency.table import Curve, LatencyTable


@dataclass(frozen=True)
class LatencyCost:
    """The cost of one model's blocks in milliseconds."""

    structure: Structure
    table: LatencyTable
    experts_per_token: int = 0

    def total(self, sizes: Sizes | None = None, blocks: Sequence[int] | None = None) -> float:
        """Returns the latency of all blocks, or of the given ones, in milliseconds."""
        sizes = sizes or self.structure.sizes
        numbers = range(len(sizes.heads)) if blocks is None else blocks
        end = len(sizes.ffn) - 1
        return sum(self.table.block(sizes.key_value_heads[number], sizes.ffn[number], number == end) for number in numbers)

    def unit(self, number: int, what: Component, sizes: Sizes) -> float:
        """Returns the mean latency of one head group or FFN neuron of a block, in milliseconds."""
        prices = self.prices(number, what)
        return max(prices[-1], 1e-9) / count_of(sizes, number, what)  # never 0: scores are divided by it

    def prices(self, number: int, what: Component) -> tuple[float, ...]:
        """Returns the latency that 0, 1, 2, ... head groups or FFN neurons add to the rest of the block."""
        curve = self.table.heads if what == "heads" else self.table.ffn
        share = self._share(number, what)
        return tuple(share * curve.at(count) for count in range(count_of(self.structure.sizes, number, what) + 1))

    def expected(self, counts: Mapping[tuple[int, Component], Tensor], hidden: Tensor | int, present_L: Tensor) -> Tensor:
        """Returns the expected latency of all blocks in milliseconds, float32 `[]`; see `prune.cost.CostModel`."""
        sizes, costs = self.structure.sizes, []
        for number in range(self.structure.depth):
            cost: Tensor = present_L[number] * self.table.block_ms
            whats: tuple[tuple[Component, Curve], ...] = (("heads", self.table.heads), ("ffn", self.table.ffn))
            for what, curve in whats:
                given, share = counts.get((number, what)), self._share(number, what)
                ms = curve.at(count_of(sizes, number, what)) if given is None else curve.expected(given)
                cost = cost + present_L[number] * share * ms
            costs.append(cost)
        total: Tensor = sum(costs[1:], costs[0])
        return total

    def _share(self, number: int, what: Component) -> float:
        """Returns the share of its milliseconds that a component takes in a block of the whole model: below 1 in the last block."""
        return self.table.shares(number == self.structure.depth - 1)[0 if what == "heads" else 1]
