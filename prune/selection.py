"""Selection: from a share of the cost that may stay, and scores, to what is kept.

With a share t of the cost of the blocks to be kept, and k of {depth, width, inside} to be cut (layers; hidden; heads, ffn and experts),
each is cut to t^(1/k) of what it was, as their product is the cost; the last of them takes what rounding left over, so that t is kept, and
where it cannot take so much the others are cut further, step by step, until it can:

    layers   the blocks with the largest scores
    hidden   the channels with the largest scores, in multiples of `multiple_of`
    inside   counts for each component by an allocation (`prune.allocation`), then those with the largest scores

Where scores are learned probabilities to be there, the numbers of layers and channels are those that are more likely there than not, or the
nearest with which the budget can be met; `inside` takes what is left over as before.

Of equal scores the lowest index is kept. `protect` holds on to components and blocks; channels run through all modules, so that it says
nothing of them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.core.errors import InputError, nearest
from compress.models.structure import Sizes, Structure
from prune.allocation import Counts, Part, cheapest, top
from prune.cost import Component, Costs, count_of
from prune.surgery import Kept

Granularity = Literal["heads", "ffn", "hidden", "layers", "vocabulary", "experts"]
COMPONENTS: tuple[Component, ...] = ("heads", "ffn", "experts")
Allocate = Callable[[Sequence[Part], float], Counts]


@dataclass(frozen=True)
class Limits:
    """What may be taken away."""

    granularity: tuple[Granularity, ...]
    multiple_of: int
    """Neurons and channels are kept in multiples of it."""
    protected: frozenset[tuple[int, Component]]
    """Components that are kept whole."""
    blocks: frozenset[int]
    """Blocks that stay."""
    asked: str = "sparsity"
    """Key of the stage that says how much is to go, for messages."""

    @property
    def inside(self) -> tuple[Component, ...]:
        """What is cut inside of blocks."""
        return tuple(what for what in COMPONENTS if what in self.granularity)

    def free(self, structure: Structure) -> bool:
        """Whether anything of the blocks may be taken away."""
        inside = ((block, what) for block in range(structure.depth) for what in self.inside)
        layers = "layers" in self.granularity and len(self.blocks) < structure.depth
        return layers or "hidden" in self.granularity or any(part not in self.protected for part in inside)

    @property
    def dimensions(self) -> list[str]:
        """What is cut, in order; the last one takes what is left over."""
        return [name for name in ("layers", "hidden") if name in self.granularity] + ["inside"] * bool(self.inside)


@dataclass(frozen=True)
class Whole:
    """The model that came in: what shares are taken of."""

    cost: float
    """Of its blocks."""
    depth: int
    """Blocks that it had."""
    sizes: Sizes
    """Its sizes, of those blocks that are left."""

    @classmethod
    def of(cls, cost: Costs) -> Whole:
        """Returns a model from which nothing has been taken yet."""
        return cls(cost.total(), cost.structure.depth, cost.structure.sizes)

    def after(self, layers: Sequence[int]) -> Whole:
        """Returns the same with some of the blocks that were left."""
        return replace(self, sizes=self.sizes.of_layers(layers))


@dataclass(frozen=True)
class Scores:
    """Importance of everything that may be taken away."""

    components: Mapping[tuple[int, Component], Tensor]
    """By block: of groups of heads, neurons or experts, float `[n]`."""
    layers: Tensor
    """Of blocks, float `[L]`."""
    hidden: Tensor
    """Of channels, float `[D]`."""

    @classmethod
    def equal(cls, structure: Structure, inside: Sequence[Component]) -> Scores:
        """Returns 1 for everything, for where there is nothing to choose."""
        sizes = structure.sizes
        components = {(block, what): torch.ones(count_of(sizes, block, what)) for block in range(structure.depth) for what in inside}
        return cls(components, torch.ones(structure.depth), torch.ones(sizes.hidden))


def protected_parts(structure: Structure, patterns: Sequence[str], key: str) -> tuple[frozenset[tuple[int, Component]], frozenset[int]]:
    """Returns the components and blocks that patterns of module names protect.

    Args:
        structure: Of the model.
        patterns: With `*`; a component is protected where one of its layers matches, a block where it or something in it does.
        key: Key path of the patterns, for messages.

    Raises:
        InputError: A pattern matches nothing.
    """
    owners: dict[str, list[tuple[int, Component]]] = {}
    for block in range(structure.depth):
        found: dict[Component, set[str]] = {
            "heads": {name for name, _ in structure.heads[block]},
            "ffn": {name for name, _ in structure.ffn[block]},
            "experts": {name for name, _ in structure.experts[block]},
        }
        for what, names in found.items():
            for name in names:
                owners.setdefault(name.rpartition(".")[0], []).append((block, what))
        owners[f"{structure.prefix}.{block}"] = [(block, what) for what in COMPONENTS]
    unused = [pattern for pattern in patterns if not fnmatch.filter(owners, pattern)]
    if unused:
        named = f"modules are named like {', '.join(list(owners)[:3])}"
        raise InputError(*(f"{key}: {pattern!r} matches nothing; {named}{nearest(pattern, owners)}" for pattern in unused))
    parts = frozenset(part for pattern in patterns for name in fnmatch.filter(owners, pattern) for part in owners[name])
    return parts, frozenset(block for block, _ in parts)


def select(
    cost: Costs, whole: Whole, share: float, limits: Limits, scores: Scores, allocate: Allocate, key: str, learned: bool = False
) -> Kept:
    """Returns what is kept of a model.

    Args:
        cost: Of the model as it is.
        whole: The model that came in, which may have been larger.
        share: Share of its cost that may stay.
        limits: What may be taken away.
        scores: Importance; what is not cut needs none.
        allocate: Gives the counts of components that fit a budget.
        key: Key path of the stage, for messages.
        learned: Whether scores are probabilities to be there.

    Raises:
        InputError: Not so much can be taken away.
    """
    structure = cost.structure
    sizes, kept = structure.sizes, Kept.everything(structure.sizes)
    budget = share * whole.cost
    if limits.dimensions != ["inside"]:
        outside = _Outside(cost, whole, limits, scores)
        number, width = outside.likely(budget) if learned else outside.even(share)
        number, width = outside.fitting(number, width, budget)
        kept = replace(kept, layers=outside.layers(number))
        if "hidden" in limits.granularity:
            kept = replace(kept, hidden=top(scores.hidden, width))
    narrow = replace(sizes, hidden=len(kept.hidden))
    parts = parts_of(cost, whole, limits, kept.layers, len(kept.hidden))
    room = budget - (cost.total(narrow, kept.layers) - sum(part.price(part.size) for part in parts))
    if cheapest(parts) > room + 1e-9 * budget:
        raise _too_much(key, share, 1 - (budget - room + cheapest(parts)) / whole.cost, limits)
    for part, count in (allocate(parts, room) if parts else {}).items():
        if count < part.size:
            lists = list(getattr(kept, part.what))
            lists[part.block] = top(scores.components[part.block, part.what], count)
            kept = replace(kept, **{part.what: lists})
    return kept


def parts_of(cost: Costs, whole: Whole, limits: Limits, layers: Sequence[int], hidden: int) -> list[Part]:
    """Returns the components that may be cut, in blocks that stay, with their cost in a model of `hidden` channels."""
    sizes = replace(cost.structure.sizes, hidden=hidden)
    return [
        Part(
            block,
            what,
            count_of(sizes, block, what),
            cost.unit(block, what, sizes),
            count_of(whole.sizes, block, what),
            limits.multiple_of if what == "ffn" else 1,
            max(1, cost.experts_per_token) if what == "experts" else 1,
            (block, what) in limits.protected,
            cost.prices(block, what),
        )
        for block in layers
        for what in limits.inside
        if count_of(sizes, block, what)
    ]


def lowest_share(cost: Costs, whole: Whole, limits: Limits, scores: Scores | None = None) -> float:
    """Returns the smallest share of the cost that a model can be cut to; without scores that of the cheapest blocks."""
    if scores is not None or "layers" not in limits.granularity or limits.blocks:
        return _Outside(cost, whole, limits, scores).lowest() / whole.cost
    depth = cost.structure.depth
    single = (Scores({}, -(torch.arange(depth) - block).abs().float(), torch.zeros(0)) for block in range(depth))
    return min(_Outside(cost, whole, limits, one).lowest() for one in single) / whole.cost


def likely_blocks(cost: Costs, whole: Whole, limits: Limits, scores: Scores, budget: float) -> list[int]:
    """Returns the blocks that `select` keeps where scores are learned, ascending."""
    outside = _Outside(cost, whole, limits, scores)
    number, _ = outside.fitting(*outside.likely(budget), budget)
    return outside.layers(number)


class _Outside:
    """How many layers and channels stay: numbers from which `inside` goes on.

    Args:
        cost: Of the model as it is.
        whole: The model that came in.
        limits: What may be taken away.
        scores: Of layers and channels; None where no layer is chosen by them.
    """

    def __init__(self, cost: Costs, whole: Whole, limits: Limits, scores: Scores | None) -> None:
        self.cost, self.whole, self.limits, self.sizes = cost, whole, limits, cost.structure.sizes
        self.ranked = torch.zeros(cost.structure.depth) if scores is None else scores.layers.double().clone()
        self.ranked[sorted(limits.blocks)] = math.inf
        self.channels = torch.zeros(0) if scores is None else scores.hidden
        self.by_layers, self.by_width = ("layers" in limits.granularity, "hidden" in limits.granularity)
        self.depth, self.step = cost.structure.depth, limits.multiple_of
        self.fewest = max(1, len(limits.blocks)) if self.by_layers else self.depth
        self.narrowest = min(self.step, self.sizes.hidden) if self.by_width else self.sizes.hidden

    def layers(self, number: int) -> list[int]:
        """Returns which layers stay if so many do."""
        return top(self.ranked, number)

    def even(self, share: float) -> tuple[int, int]:
        """Returns numbers of layers and channels that are cut to the same share as each other, and as what is inside."""
        each = share ** (1 / max(1, len(self.limits.dimensions)))
        number = max(self.fewest, math.floor(self.whole.depth * each + 0.5))
        return min(self.depth, number), self._rounded(self.whole.sizes.hidden * each)

    def likely(self, budget: float) -> tuple[int, int]:
        """Returns the numbers of those that are more likely there than not, or more where that uses the budget."""
        number = max(self.fewest, int((self.ranked > 0.5).sum()))
        number, width = self.fitting(number, self._rounded(int((self.channels > 0.5).sum())), budget)
        while self.most(number, width) < budget and number < self.depth and self.least(number + 1, width) <= budget:
            number += 1
        while self.most(number, width) < budget and width < self.sizes.hidden and self.least(number, self._wider(width)) <= budget:
            width = self._wider(width)
        return number, width

    def fitting(self, number: int, width: int, budget: float) -> tuple[int, int]:
        """Returns the same numbers, or the nearest with which the budget can be met by what is inside; the fewest where none can.

        Of a layer and a step of channels the one goes first that is the smaller share of what is left.
        """
        while self.least(number, width) > budget * (1 + 1e-9) and (number > self.fewest or width > self.narrowest):
            narrower = max(self.narrowest, (math.ceil(width / self.step) - 1) * self.step)
            if number == self.fewest or (width > self.narrowest and 1 - narrower / width <= 1 / number):
                width = narrower
            else:
                number -= 1
        return number, width

    def most(self, number: int, width: int) -> float:
        """Returns the cost with all that is inside."""
        return self.cost.total(replace(self.sizes, hidden=width), self.layers(number))

    def least(self, number: int, width: int) -> float:
        """Returns the cost with as little inside as may be."""
        parts = parts_of(self.cost, self.whole, self.limits, self.layers(number), width)
        return self.most(number, width) - sum(part.price(part.size) for part in parts) + cheapest(parts)

    def lowest(self) -> float:
        """Returns the lowest cost of all."""
        return self.least(self.fewest, self.narrowest)

    def _rounded(self, width: float) -> int:
        if not self.by_width:
            return self.sizes.hidden
        return min(self.sizes.hidden, max(self.narrowest, math.floor(width / self.step + 0.5) * self.step))

    def _wider(self, width: int) -> int:
        return min(self.sizes.hidden, width + self.step)


def _too_much(key: str, share: float, most: float, limits: Limits) -> InputError:
    more = [name for name in ("heads", "ffn", "hidden", "layers") if name not in limits.granularity]
    remedy = f"add {' or '.join(more)} to granularity, or give less" if more else "give less"
    given = f"{1 - share:.4g} given" if limits.asked == "sparsity" else f"takes {1 - share:.4g} of the blocks"
    taken = f"{', '.join(limits.granularity)} can take at most {max(0.0, most):.4g} of the blocks"
    return InputError(f"{key}.{limits.asked}: {given}; {taken}: {remedy}")
