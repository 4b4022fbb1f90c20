"""Slices under a budget of milliseconds: which heads and neurons `sparsify` zeroes so that the compacted model is as fast as asked.

The latency table of `prune` says what a block costs on the engine by its heads and neurons (`prune.latency.table`), which is what a block
costs after `prune.compact` has removed the zeros. With S(u) = ||V_u||^2, what the loss pays for slice u (`prune.sparsify.slices`), and T(k)
the milliseconds of the blocks with k_i slices left in bundle i:

    choose k with  T(k) <= budget;  the slices with the smallest S per millisecond go first, over all bundles together

so that layers may differ in sparsity, and a step that saves no time is taken together with the next one (`prune.allocation.by_score`). The
compacted shape is timed as a whole and the budget corrected, as in `prune` (`prune.latency.budget`). This is the selection of ZipLM
(Kurtic et al. 2023, https://arxiv.org/abs/2302.04089, section 3.2) with a diagonal metric, and ratios in place of its search.

Limitations: as of the latency table: no experts, one stack of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prune.allocation import Part, by_score, cheapest, top
from prune.cost import count_of
from prune.sparsify.slices import Bundle
from prune.surgery import KeptUnits

if TYPE_CHECKING:
    from torch import nn

    from foundation.models.architecture.structure import Sizes
    from prune.latency.budget import LatencyBudget
    from prune.latency.cost import LatencyCost


@dataclass(frozen=True)
class SliceBudget:
    """The slices of a model with what they cost on an engine."""

    cost: LatencyCost
    bundles: Sequence[Bundle]
    lines: int
    """Neurons of a slice; heads are slices of one."""

    @cached_property
    def parts(self) -> list[Part]:
        """The bundles as components whose units an allocation counts, in their order."""
        sizes, cost = self.cost.structure.sizes, self.cost
        counts = [count_of(sizes, bundle.block, bundle.what) for bundle in self.bundles]
        found = [
            Part(bundle.block, bundle.what, count, cost.unit(bundle.block, bundle.what, sizes), count, self._step(bundle))
            for bundle, count in zip(self.bundles, counts, strict=True)
        ]
        return [replace(part, prices=cost.prices(part.block, part.component)) for part in found]

    def _step(self, bundle: Bundle) -> int:
        return self.lines if bundle.what == "ffn" else 1

    @property
    def least_ms(self) -> float:
        """Milliseconds of the blocks with one slice of each bundle left."""
        return self._outside() + cheapest(self.parts)

    def _outside(self) -> float:
        """Returns the milliseconds of what no slice takes away."""
        return self.cost.total() - sum(part.price(part.size) for part in self.parts)

    def stays(self, weights: Mapping[str, Tensor], budget_ms: float) -> list[Tensor]:
        """Returns which slices stay within a budget of the blocks, bool `[G]` for each bundle.

        Args:
            weights: Weights by layer in the metric, `[O, I]`.
            budget_ms: Milliseconds of the blocks; at least `least_ms`.
        """
        parts, scores = self.parts, dict[Part, Tensor]()
        squares = [bundle.squares(weights).cpu() for bundle in self.bundles]
        for part, bundle, square_G in zip(parts, self.bundles, squares, strict=True):
            units_G = torch.bincount(torch.arange(part.size) // self._step(bundle))
            scores[part] = (square_G / units_G).repeat_interleave(units_G)
        counts = by_score(parts, scores, budget_ms - self._outside())
        found = []
        for part, bundle, square_G in zip(parts, self.bundles, squares, strict=True):
            number = -(-counts[part] // self._step(bundle))
            stays_G = torch.zeros(bundle.groups, dtype=torch.bool)
            whole = part.size // self._step(bundle)  # a slice at the end may be smaller; it stays only if all do
            stays_G[top(square_G[:whole], number) if number < bundle.groups else slice(None)] = True
            found.append(stays_G)
        return found

    def kept(self, stays: Sequence[Tensor]) -> KeptUnits:
        """Returns the units that are left of the model when the other slices are compacted."""
        kept = KeptUnits.everything(self.cost.structure.sizes)
        for bundle, part, stays_G in zip(self.bundles, self.parts, stays, strict=True):
            lists = list(getattr(kept, bundle.what))
            lists[bundle.block] = tuple(unit for unit in range(part.size) if bool(stays_G[unit // self._step(bundle)]))
            kept = replace(kept, **{bundle.what: lists})
        return kept

    def share_of_zeros(self, weights: Mapping[str, Tensor], stays: Sequence[Tensor]) -> float:
        """Returns the share of the bundles' weights in slices that go."""
        sizes = [bundle.sizes(weights).cpu() for bundle in self.bundles]
        gone = sum(float(size_G[~stays_G].sum()) for size_G, stays_G in zip(sizes, stays, strict=True))
        return gone / sum(float(size_G.sum()) for size_G in sizes)

    def within(self, weights: Mapping[str, Tensor], share: float) -> list[Tensor]:
        """Returns which slices stay when the blocks keep a share of their milliseconds by the table; see `stays`."""
        return self.stays(weights, max(share * self.cost.total(), self.least_ms))

    def fit(self, weights: Mapping[str, Tensor], latency: LatencyBudget, share: float, model: nn.Module, key: str) -> list[Tensor]:
        """Returns which slices stay so that the compacted model is as fast as asked, as measured.

        Args:
            weights: Weights by layer in the metric, `[O, I]`.
            latency: The target and what was measured so far.
            share: Share of the milliseconds of the blocks that remains in the first round.
            model: The model.
            key: Key path of the stage, for messages.
        """
        sizes: Sizes = self.cost.structure.sizes
        tried: list[tuple[KeptUnits, list[Tensor]]] = []

        def choose(budget_ms: float) -> KeptUnits:
            stays = self.stays(weights, max(budget_ms, self.least_ms))
            tried.append((self.kept(stays), stays))
            return tried[-1][0]

        total = self.cost.total()
        kept, _ = latency.fit(choose, model, sizes, share * total, self.least_ms, total, key)
        return next(stays for units, stays in tried if units == kept)
