"""Selection: from importance scores and a budget to the units that stay.

Let t be the share of the blocks' cost that may stay, and k the number of dimensions to cut among layers, hidden, and inside (heads, ffn,
experts). The cost is the product of the dimensions, so each is cut to t^(1/k) of its size. The last dimension absorbs the rounding, so that
t is met; if it cannot, the others are cut further, step by step:

    layers   the layers with the highest scores
    hidden   the channels with the highest scores, in multiples of `multiple_of`
    inside   counts per component, in multiples of `divisible_by` (FFN neurons also of `multiple_of`), from an allocation
    (`prune.allocation`), then the units with the highest scores

If the scores are learned probabilities, layers and channels with a probability above 1/2 stay, or the nearest numbers that meet the budget;
`inside` absorbs the rest as before.

Ties go to the lowest index. `protect` covers components and blocks; it does not cover channels, which run through all modules.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foundation.core.errors import InputError, Problem, nearest
from foundation.models.architecture.structure import Sizes, Structure
from prune.allocation import Counts, Part, cheapest, top
from prune.choices import Granularity
from prune.cost import Component, CostModel, count_of
from prune.surgery import KeptUnits

COMPONENTS: tuple[Component, ...] = ("heads", "cross", "ffn", "experts")
Allocate = Callable[[Sequence[Part], float], Counts]


@dataclass(frozen=True)
class Limits:
    """Units that may be pruned."""

    granularity: tuple[Granularity, ...]
    multiple_of: int
    """FFN neurons and channels are kept in multiples of this."""
    protected: frozenset[tuple[int, Component]]
    """Components that keep all of their units."""
    blocks: frozenset[int]
    """Blocks that must stay."""
    target_key: str = "sparsity"
    """Recipe key that sets the target, for messages."""
    divisible_by: int = 1
    """Heads, FFN neurons and experts are kept in multiples of this too."""

    @property
    def inside(self) -> tuple[Component, ...]:
        """Components that are cut inside blocks."""
        return tuple(what for what in COMPONENTS if ("heads" if what == "cross" else what) in self.granularity)

    def step_of(self, what: Component) -> int:
        """Returns the multiple in which units of a component are kept."""
        return math.lcm(self.multiple_of, self.divisible_by) if what == "ffn" else self.divisible_by

    def free(self, structure: Structure) -> bool:
        """Returns whether anything in the blocks may be pruned."""
        inside = ((block, what) for block in range(structure.depth) for what in self.inside if count_of(structure.sizes, block, what))
        layers = "layers" in self.granularity and len(self.blocks) < structure.depth
        return layers or "hidden" in self.granularity or any(part not in self.protected for part in inside)

    @property
    def dimensions(self) -> list[str]:
        """Dimensions to cut, in order; the last one absorbs the rounding."""
        return [name for name in ("layers", "hidden") if name in self.granularity] + ["inside"] * bool(self.inside)


@dataclass(frozen=True)
class Incoming:
    """The incoming model, which all shares refer to."""

    cost: float
    """Cost of its blocks."""
    depth: int
    """Number of its blocks."""
    sizes: Sizes
    """Its sizes, of the blocks that are left."""

    @classmethod
    def of(cls, cost: CostModel) -> Incoming:
        """Returns the reference for a model that has not been pruned yet."""
        return cls(cost.total(), cost.structure.depth, cost.structure.sizes)

    def after(self, layers: Sequence[int]) -> Incoming:
        """Returns the reference after some blocks were removed: `layers` are those that stay."""
        return replace(self, sizes=self.sizes.of_layers(layers))


@dataclass(frozen=True)
class Scores:
    """Importance scores of all prunable units."""

    components: Mapping[tuple[int, Component], Tensor]
    """Scores of head groups, FFN neurons or experts by block, float `[n]` each."""
    layers: Tensor
    """Scores of blocks, float `[L]`."""
    hidden: Tensor
    """Scores of channels, float `[D]`."""

    @classmethod
    def equal(cls, structure: Structure, inside: Sequence[Component]) -> Scores:
        """Returns scores of 1 for every unit, for when nothing has to be chosen."""
        sizes = structure.sizes
        numbers = {(block, what): count_of(sizes, block, what) for block in range(structure.depth) for what in inside}
        components = {part: torch.ones(number) for part, number in numbers.items() if number or part[1] != "cross"}
        return cls(components, torch.ones(structure.depth), torch.ones(sizes.hidden))


def protected_parts(structure: Structure, patterns: Sequence[str], key: str) -> tuple[frozenset[tuple[int, Component]], frozenset[int]]:
    """Returns the components and blocks that name patterns protect.

    Args:
        structure: Structure of the model.
        patterns: Patterns with `*`. One that matches a layer protects its component; one that matches a block, or a part of it, that block.
        key: Key path of the patterns, for messages.

    Raises:
        InputError: A pattern matches nothing.
    """
    owners: dict[str, list[tuple[int, Component]]] = {}
    for block in range(structure.depth):
        found: dict[Component, set[str]] = {
            "heads": {name for name, _ in structure.heads[block]},
            "cross": {name for name, _ in structure.cross[block]},
            "ffn": {name for name, _ in structure.ffn[block]},
            "experts": {name for name, _ in structure.experts[block]},
        }
        for what, names in found.items():
            for name in names:
                owners.setdefault(name.rpartition(".")[0], []).append((block, what))
        owners[structure.blocks[block]] = [(block, what) for what in COMPONENTS]
    unused = [pattern for pattern in patterns if not fnmatch.filter(owners, pattern)]
    if unused:
        named = f"modules are named like {', '.join(list(owners)[:3])}"
        raise InputError.of(Problem(key, f"{pattern!r} matches nothing", f"{named}{nearest(pattern, owners)}") for pattern in unused)
    parts = frozenset(part for pattern in patterns for name in fnmatch.filter(owners, pattern) for part in owners[name])
    return parts, frozenset(block for block, _ in parts)


def select(
    cost: CostModel, incoming: Incoming, share: float, limits: Limits, scores: Scores, allocate: Allocate, key: str, learned: bool = False
) -> KeptUnits:
    """Returns the units that stay.

    Args:
        cost: Cost of the model as it is.
        incoming: The incoming model, which may have been larger.
        share: Share of the incoming cost that may stay.
        limits: What may be pruned.
        scores: Importance scores; not needed for units that are not cut.
        allocate: Splits a budget into counts per component.
        key: Key path of the stage, for messages.
        learned: Whether the scores are learned probabilities of being kept.

    Raises:
        InputError: The limits do not allow to prune that much.
    """
    structure = cost.structure
    sizes, kept = structure.sizes, KeptUnits.everything(structure.sizes)
    budget = share * incoming.cost
    if limits.dimensions != ["inside"]:
        outside = _DepthAndWidth(cost, incoming, limits, scores)
        number, width = outside.likely(budget) if learned else outside.even(share)
        number, width = outside.fitting(number, width, budget)
        kept = replace(kept, layers=outside.layers(number))
        if "hidden" in limits.granularity:
            kept = replace(kept, hidden=top(scores.hidden, width))
    narrow = replace(sizes, hidden=len(kept.hidden))
    parts = parts_of(cost, incoming, limits, kept.layers, len(kept.hidden))
    room = budget - (cost.total(narrow, kept.layers) - sum(part.price(part.size) for part in parts))
    if cheapest(parts) > room + 1e-9 * budget:
        raise _too_much(key, share, 1 - (budget - room + cheapest(parts)) / incoming.cost, limits, cost.structure)
    for part, count in (allocate(parts, room) if parts else {}).items():
        if count < part.size:
            lists = list(getattr(kept, part.component))
            lists[part.block] = top(scores.components[part.block, part.component], count)
            kept = replace(kept, **{part.component: lists})
    return kept


def parts_of(cost: CostModel, incoming: Incoming, limits: Limits, layers: Sequence[int], hidden: int) -> list[Part]:
    """Returns the components of the given layers that may be cut, priced for a model with `hidden` channels."""
    sizes = replace(cost.structure.sizes, hidden=hidden)
    return [
        Part(
            block,
            what,
            count_of(sizes, block, what),
            cost.unit(block, what, sizes),
            count_of(incoming.sizes, block, what),
            limits.step_of(what),
            max(1, cost.experts_per_token) if what == "experts" else 1,
            (block, what) in limits.protected,
            cost.prices(block, what),
        )
        for block in layers
        for what in limits.inside
        if count_of(sizes, block, what)
    ]


def lowest_share(cost: CostModel, incoming: Incoming, limits: Limits, scores: Scores | None = None) -> float:
    """Returns the smallest share of the cost that can be reached; without scores, the share with the cheapest blocks kept."""
    if scores is not None or "layers" not in limits.granularity or limits.blocks:
        return _DepthAndWidth(cost, incoming, limits, scores).lowest() / incoming.cost
    depth = cost.structure.depth
    single = (Scores({}, -(torch.arange(depth) - block).abs().float(), torch.zeros(0)) for block in range(depth))
    return min(_DepthAndWidth(cost, incoming, limits, one).lowest() for one in single) / incoming.cost


def likely_blocks(cost: CostModel, incoming: Incoming, limits: Limits, scores: Scores, budget: float) -> list[int]:
    """Returns the blocks that `select` keeps with learned scores, ascending."""
    outside = _DepthAndWidth(cost, incoming, limits, scores)
    number, _ = outside.fitting(*outside.likely(budget), budget)
    return outside.layers(number)


class _DepthAndWidth:
    """Decides how many layers and channels stay, before the components inside blocks are cut.

    Args:
        cost: Cost of the model as it is.
        incoming: The incoming model.
        limits: What may be pruned.
        scores: Scores of layers and channels; None if layers are not ranked.
    """

    def __init__(self, cost: CostModel, incoming: Incoming, limits: Limits, scores: Scores | None) -> None:
        self.cost, self.incoming, self.limits, self.sizes = cost, incoming, limits, cost.structure.sizes
        self.ranked = torch.zeros(cost.structure.depth) if scores is None else scores.layers.double().clone()
        self.ranked[sorted(limits.blocks)] = math.inf
        stacks = cost.structure.stacks
        needed = set(limits.blocks) | ({self._best(stack.numbers) for stack in stacks} if len(stacks) > 1 else set())
        self.ranked[sorted(needed)] = math.inf  # an encoder-decoder needs a layer on either side
        self.channels = torch.zeros(0) if scores is None else scores.hidden
        self.by_layers, self.by_width = ("layers" in limits.granularity, "hidden" in limits.granularity)
        self.depth, self.step = cost.structure.depth, limits.multiple_of
        self.fewest = max(1, len(needed)) if self.by_layers else self.depth
        self.narrowest = min(self.step, self.sizes.hidden) if self.by_width else self.sizes.hidden

    def _best(self, blocks: range) -> int:
        """Returns the block with the highest score."""
        return max(blocks, key=lambda block: (float(self.ranked[block]), -block))

    def layers(self, number: int) -> list[int]:
        """Returns the `number` layers with the highest scores."""
        return top(self.ranked, number)

    def even(self, share: float) -> tuple[int, int]:
        """Returns the numbers of layers and channels when every dimension is cut to the same share."""
        each = share ** (1 / max(1, len(self.limits.dimensions)))
        number = max(self.fewest, math.floor(self.incoming.depth * each + 0.5))
        return min(self.depth, number), self._rounded(self.incoming.sizes.hidden * each)

    def likely(self, budget: float) -> tuple[int, int]:
        """Returns the numbers of layers and channels with a probability above 1/2, or more if the budget has room."""
        number = max(self.fewest, int((self.ranked > 0.5).sum()))
        number, width = self.fitting(number, self._rounded(int((self.channels > 0.5).sum())), budget)
        while self.most(number, width) < budget and number < self.depth and self.least(number + 1, width) <= budget:
            number += 1
        while self.most(number, width) < budget and width < self.sizes.hidden and self.least(number, self._wider(width)) <= budget:
            width = self._wider(width)
        return number, width

    def fitting(self, number: int, width: int, budget: float) -> tuple[int, int]:
        """Returns the nearest numbers at which cutting inside blocks can meet the budget; the smallest numbers if none can.

        Each step removes a layer or a step of channels, whichever is the smaller share of its dimension.
        """
        while self.least(number, width) > budget * (1 + 1e-9) and (number > self.fewest or width > self.narrowest):
            narrower = max(self.narrowest, (math.ceil(width / self.step) - 1) * self.step)
            if number == self.fewest or (width > self.narrowest and 1 - narrower / width <= 1 / number):
                width = narrower
            else:
                number -= 1
        return number, width

    def most(self, number: int, width: int) -> float:
        """Returns the cost with nothing cut inside blocks."""
        return self.cost.total(replace(self.sizes, hidden=width), self.layers(number))

    def least(self, number: int, width: int) -> float:
        """Returns the cost with as much cut inside blocks as allowed."""
        parts = parts_of(self.cost, self.incoming, self.limits, self.layers(number), width)
        return self.most(number, width) - sum(part.price(part.size) for part in parts) + cheapest(parts)

    def lowest(self) -> float:
        """Returns the lowest reachable cost."""
        return self.least(self.fewest, self.narrowest)

    def _rounded(self, width: float) -> int:
        if not self.by_width:
            return self.sizes.hidden
        return min(self.sizes.hidden, max(self.narrowest, math.floor(width / self.step + 0.5) * self.step))

    def _wider(self, width: int) -> int:
        return min(self.sizes.hidden, width + self.step)


def _too_much(key: str, share: float, most: float, limits: Limits, structure: Structure) -> InputError:
    cuttable = ("ffn", "hidden", "layers") if structure.tables else ("heads", "ffn", "hidden", "layers")
    more = [name for name in cuttable if name not in limits.granularity]
    remedy = f"add {' or '.join(more)} to granularity, or lower the target" if more else "lower the target"
    given = f"{1 - share:.4g} given" if limits.target_key == "sparsity" else f"needs {1 - share:.4g} removed"
    taken = f"pruning {', '.join(limits.granularity)} can remove at most {max(0.0, most):.4g} of the blocks' cost"
    return InputError(f"{key}.{limits.target_key}", given, taken, remedy)
