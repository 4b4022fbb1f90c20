"""Selection: from a share of the cost that may stay, and scores, to what is kept.

With a share t of the cost of the blocks to be kept, and k of {depth, width, inside} to be cut (layers; hidden; heads, ffn and experts),
each is cut to t^(1/k) of what it was, as their product is the cost; the last of them takes what rounding left over, so that t is kept:

    layers   the blocks with the largest scores
    hidden   the channels with the largest scores, in multiples of `multiple_of`
    inside   counts for each component by an allocation (`prune.allocation`), then those with the largest scores

Where scores are learned probabilities to be there, the numbers of layers and channels are those that are more likely there than not, or the
nearest with which the budget can be met; `inside` takes what is left over as before.

Of equal scores the lowest index is kept.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from compress.errors import InputError, nearest
from compress.structure import Sizes, Structure
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

    @property
    def inside(self) -> tuple[Component, ...]:
        """What is cut inside of blocks."""
        return tuple(what for what in COMPONENTS if what in self.granularity)

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
    dimensions, budget = limits.dimensions, share * whole.cost
    each = share ** (1 / max(1, len(dimensions)))
    if learned and dimensions != ["inside"]:
        layers, width = _likely(cost, whole, budget, limits, scores)
        kept = replace(kept, layers=layers, hidden=top(scores.hidden, width))
        dimensions = [name for name in dimensions if name == "inside"]
    if "layers" in dimensions:
        layers = _layers(cost, whole, each, budget, limits, scores, last=dimensions[-1] == "layers")
        kept = replace(kept, layers=layers)
    if "hidden" in dimensions:
        width = _width(cost, whole, each, budget, limits, kept.layers, last=dimensions[-1] == "hidden")
        kept = replace(kept, hidden=top(scores.hidden, width))
    narrow = replace(sizes, hidden=len(kept.hidden))
    if limits.inside:
        parts = parts_of(cost, whole, limits, kept.layers, len(kept.hidden))
        room = budget - (cost.total(narrow, kept.layers) - sum(part.price(part.size) for part in parts))
        if cheapest(parts) > room * (1 + 1e-9):
            raise _too_much(key, share, 1 - (budget - room + cheapest(parts)) / whole.cost, limits)
        for part, count in allocate(parts, room).items():
            if count < part.size:
                lists = list(getattr(kept, part.what))
                lists[part.block] = top(scores.components[part.block, part.what], count)
                kept = replace(kept, **{part.what: lists})
    elif cost.total(narrow, kept.layers) > budget * (1 + 1e-9):
        raise _too_much(key, share, 1 - cost.total(narrow, kept.layers) / whole.cost, limits)
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


def lowest_share(cost: Costs, whole: Whole, limits: Limits) -> float:
    """Returns the smallest share of the cost that heads, neurons and experts alone can be cut to."""
    everything = range(cost.structure.depth)
    parts = parts_of(cost, whole, limits, everything, cost.structure.sizes.hidden)
    return (cost.total() - sum(part.price(part.size) for part in parts) + cheapest(parts)) / whole.cost


def _likely(cost: Costs, whole: Whole, budget: float, limits: Limits, scores: Scores) -> tuple[list[int], int]:
    """Returns the layers and the number of channels that are more likely there than not, or the nearest that fit."""
    sizes, step, cut = cost.structure.sizes, limits.multiple_of, limits.dimensions
    ranked = scores.layers.double().clone()
    ranked[sorted(limits.blocks)] = math.inf
    fewest = max(1, len(limits.blocks)) if "layers" in cut else len(ranked)
    narrowest = min(step, sizes.hidden) if "hidden" in cut else sizes.hidden
    number = max(fewest, int((ranked > 0.5).sum()))
    likely = int((scores.hidden > 0.5).sum()) if "hidden" in cut else sizes.hidden
    width = min(sizes.hidden, max(narrowest, math.floor(likely / step + 0.5) * step)) if "hidden" in cut else sizes.hidden

    def most(number: int, width: int) -> float:
        return cost.total(replace(sizes, hidden=width), top(ranked, number)) if "hidden" in cut else cost.total(blocks=top(ranked, number))

    def least(number: int, width: int) -> float:
        parts = parts_of(cost, whole, limits, top(ranked, number), width)
        return most(number, width) - sum(part.price(part.size) for part in parts) + cheapest(parts)

    while least(number, width) > budget * (1 + 1e-9) and (number > fewest or width > narrowest):
        number, width = (number - 1, width) if number > fewest else (number, max(narrowest, (math.ceil(width / step) - 1) * step))
    while most(number, width) < budget and number < len(ranked) and least(number + 1, width) <= budget:
        number += 1
    while most(number, width) < budget and width < sizes.hidden and least(number, min(sizes.hidden, width + step)) <= budget:
        width = min(sizes.hidden, width + step)
    return top(ranked, number), width


def _layers(cost: Costs, whole: Whole, each: float, budget: float, limits: Limits, scores: Scores, last: bool) -> list[int]:
    depth = cost.structure.depth
    number = min(depth, max(1, len(limits.blocks), math.floor(whole.depth * each + 0.5)))
    while True:
        protected = scores.layers.double().clone()
        protected[sorted(limits.blocks)] = math.inf
        layers = top(protected, number)
        if not last or number <= max(1, len(limits.blocks)) or cost.total(blocks=layers) <= budget * (1 + 1e-9):
            return layers
        number -= 1


def _width(cost: Costs, whole: Whole, each: float, budget: float, limits: Limits, layers: Sequence[int], last: bool) -> int:
    sizes, step = cost.structure.sizes, limits.multiple_of
    width = min(sizes.hidden, max(step, math.floor(whole.sizes.hidden * each / step + 0.5) * step))
    while last and width > step and cost.total(replace(sizes, hidden=width), layers) > budget * (1 + 1e-9):
        width = (math.ceil(width / step) - 1) * step
    return width


def _too_much(key: str, share: float, most: float, limits: Limits) -> InputError:
    more = [name for name in ("heads", "ffn", "hidden", "layers") if name not in limits.granularity]
    remedy = f"add {' or '.join(more)} to granularity, or give less" if more else "give less"
    taken = f"{', '.join(limits.granularity)} can take at most {max(0.0, most):.4g} of the blocks"
    return InputError(f"{key}.sparsity: {1 - share:.4g} given; {taken}: {remedy}")
