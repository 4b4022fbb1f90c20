"""Joint: learn masks over heads, FFN neurons, blocks and channels together with the weights (CoFi).

Each unit is multiplied by a hard concrete gate z (`prune.masks.hard_concrete`):

    head group h of block i   z_h,i        neuron n of block i   z_n,i        block i   z_layer,i        channel c   z_c
    C(z) = cost of the blocks at their expected sizes (`prune.cost`, or milliseconds of the latency table), C(1) the cost of the incoming
    model
    t(step) = t min(1, step / (warmup steps)),   t: target sparsity,   s = 1 - C(z) / C(1)
    min L over weights and masks, subject to s = t(step)

L is the objective of `prune.recovery`. No weight can absorb the gate of a block, so in the last quarter of the steps each block's gate is
fixed to 0 or 1, as selection would choose. Masks have their own learning rate, with Adam. Xia et al. 2022,
https://arxiv.org/abs/2204.00408, sections 3.1 and 3.2; the paper learns the multipliers of the constraint by gradient ascent, here a PI
controller sets the multiplier (`prune.masks.price`). Afterwards units are ranked by P(z > 0), and `prune.selection` meets the budget
exactly.

Gates are drawn once a step, from (seed, step): all micro-batches have the same, and so have several processes. The controller sees the
gradient of the whole batch, which is summed over processes for it.

Not supported: gates of whole attentions and FFNs, since every architecture here keeps at least one head group and one step of neurons; in
half an epoch of SST-2 they closed whole FFNs where some neurons of each would do. Nor the paper's search for a layer mapping: the student's
layers are layers of the incoming model, and each learns from its own origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from foundation.machine.parallel import ALONE, Team
from foundation.training.train import Batch, Objective
from prune.choices import Learn
from prune.cost import Component, CostModel, count_of
from prune.masks.hard_concrete import BOUND, OPEN, draw, fixed, present
from prune.masks.masks import Gate
from prune.masks.price import Price
from prune.selection import Incoming, Limits, Scores, likely_blocks

MASK_RATE, CROSSINGS = 0.01, 4
"""Lowest default learning rate of masks, and how many times a gate can cross from open to closed in one training."""
DECIDED = 0.25
"""Share of the steps, at the end, with fixed block gates."""
UNDECIDED = -1.0
SEED_BITS = 24
"""Steps of one seed, before the next one would repeat their gates, as a power of 2."""


def mask_rate(settings: Learn, num_steps: int) -> float:
    """Returns the learning rate of masks, with its default resolved."""
    return settings.mask_learning_rate or max(MASK_RATE, CROSSINGS * 2 * OPEN / max(1, num_steps))


class Scaled(nn.Module):
    """A vector with its own learning rate: Adam updates `raw`, and the value is `ratio` times `raw`.

    Args:
        value: Initial value, float32 `[n]`.
        ratio: Learning rate of the vector divided by the learning rate of the weights.
    """

    def __init__(self, value: Tensor, ratio: float) -> None:
        super().__init__()
        self.raw, self.ratio = nn.Parameter(value / ratio), ratio
        # Adam's steps do not depend on the scale of a gradient, but the clipping of the global norm does: it must see the value's gradient.
        self.raw.register_hook(lambda gradient: gradient / ratio)  # type: ignore[no-untyped-call]

    def forward(self) -> Tensor:
        """Returns the vector, float32 `[n]`."""
        return self.raw * self.ratio

    def bound(self, most: float) -> None:
        """Clamps the value to +-`most`."""
        with torch.no_grad():
            self.raw.clamp_(-most / self.ratio, most / self.ratio)


@dataclass(frozen=True)
class Shared:
    """State shared by all processes that learn gates together."""

    seed: int = 0
    """Seed of the gates."""
    team: Team = ALONE
    """The processes."""

    def noise(self, step: int) -> torch.Generator:
        """Returns the function that draws the gates of a step."""
        return torch.Generator().manual_seed((self.seed << SEED_BITS) + step)


class Joint(nn.Module):
    """The objective: the loss of the masked model, plus the penalty of the sparsity constraint.

    Args:
        loss: Computes the parts of the loss.
        cost: Cost of the incoming model.
        incoming: The incoming model, which shares refer to.
        sparsity: Share of its cost to remove; lowered to what gates can reach, since their probabilities never become exactly 0.
        limits: What may be masked; at least one unit must be free.
        ratio: Learning rate of the masks divided by the learning rate of the weights.
        warmup: Fraction of the steps over which the sparsity rises.
        shared: What all processes that learn the gates have in common.
    """

    decided_L: Tensor

    def __init__(
        self,
        loss: Objective,
        cost: CostModel,
        incoming: Incoming,
        sparsity: float,
        limits: Limits,
        ratio: float,
        warmup: float,
        shared: Shared | None = None,
    ) -> None:
        super().__init__()
        self.loss, self.cost, self.incoming, self.sparsity, self.limits, self.warmup = loss, cost, incoming, sparsity, limits, warmup
        self.shared = shared or Shared()
        structure = cost.structure
        self.sizes: dict[str, int] = {}
        for block in range(structure.depth):
            for what in limits.inside:
                if (block, what) not in limits.protected and count_of(structure.sizes, block, what):
                    self.sizes[f"{what}_{block}"] = count_of(structure.sizes, block, what)
            if "layers" in limits.granularity and block not in limits.blocks:
                self.sizes[f"layer_{block}"] = 1
        if "hidden" in limits.granularity:
            self.sizes["hidden"] = structure.sizes.hidden
        num_masks = sum(self.sizes.values())
        self.log_alpha, self.price = Scaled(torch.full((num_masks,), OPEN), ratio), Price(num_masks)
        self.register_buffer("decided_L", torch.full((structure.depth,), UNDECIDED))
        self.sparsity = min(sparsity, float(self.removed(torch.full((num_masks,), -BOUND))))
        self.drawn: dict[str, Tensor] = {}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each; draws new gates for every step."""
        self.log_alpha.bound(BOUND)
        if "layers" in self.limits.granularity and batch.step >= (1 - DECIDED) * batch.num_steps and not self.decided:
            self.decide()
        penalty = self.penalty(batch.step, batch.num_steps)
        seen_N = self.log_alpha()
        # gradient of the loss only: the penalty reads log_alpha in a branch of its own
        seen_N.register_hook(lambda gradient_N: self.price.add_gradient(self.shared.team.add(gradient_N.clone())))
        self.drawn = self.factors(partial(draw, generator=self.shared.noise(batch.step)), seen_N)
        return {**self.loss(model, batch), "sparsity": penalty.expand(len(batch.indices))}

    @torch.no_grad()
    def decide(self) -> None:
        """Fixes the gates of all blocks: 1 for those that selection would keep, 0 for the others."""
        kept = likely_blocks(self.cost, self.incoming, self.limits, self.scores(), (1 - self.sparsity) * self.incoming.cost)
        self.decided_L.zero_()
        self.decided_L[kept] = 1

    @property
    def decided(self) -> bool:
        """Whether the gates of the blocks are fixed."""
        return bool(self.decided_L[0] != UNDECIDED)

    def named(self, values_N: Tensor) -> dict[str, Tensor]:
        """Splits a vector over all masks by gate, `[n]` each."""
        return dict(zip(self.sizes, torch.split(values_N, list(self.sizes.values())), strict=True))

    def factors(self, of: Callable[[Tensor], Tensor], log_alpha_N: Tensor) -> dict[str, Tensor]:
        """Applies a function to the masks of every gate, float32 `[n]` each; fixed gates of blocks give 0 or 1."""
        return {name: self.factor(of, name, mask) for name, mask in self.named(log_alpha_N).items()}

    def factor(self, of: Callable[[Tensor], Tensor], name: str, mask: Tensor) -> Tensor:
        """Applies a function to the masks of one gate, float32 `[n]`."""
        what, _, block = name.rpartition("_")
        return self.decided_L[int(block)][None] if what == "layer" and self.decided else of(mask)

    def target(self, step: int, num_steps: int) -> float:
        """Returns the target sparsity of a step."""
        return self.sparsity * min(1.0, (step + 1) / max(1.0, self.warmup * num_steps))

    def penalty(self, step: int, num_steps: int) -> Tensor:
        """Returns the penalty that is added to the loss of each row, float32 `[]`: the missing sparsity times its multiplier."""
        log_alpha_N, target = self.log_alpha(), self.target(step, num_steps)
        removed = self.removed(log_alpha_N)
        slope_N = torch.zeros_like(log_alpha_N)
        if removed.requires_grad:  # false if only blocks are masked and all are fixed
            (slope_N,) = torch.autograd.grad(removed, log_alpha_N, retain_graph=True)
        return self.price.update(step, float(removed.detach()) - target, slope_N) * (target - removed)

    def expected_sparsity(self) -> float:
        """Returns the share of the cost that is removed at the expected sizes."""
        return float(self.removed(self.log_alpha()).detach())

    def removed(self, log_alpha_N: Tensor) -> Tensor:
        """Returns the share of the cost that is removed at the expected sizes, float32 `[]`."""
        structure = self.cost.structure
        probabilities = self.factors(present, log_alpha_N)
        counts: dict[tuple[int, Component], Tensor] = {}
        for block in range(structure.depth):
            for what in self.limits.inside:
                if f"{what}_{block}" in probabilities:
                    counts[block, what] = probabilities[f"{what}_{block}"].sum()
        one = log_alpha_N.new_ones(1)
        present_L = torch.cat([probabilities.get(f"layer_{block}", one) for block in range(structure.depth)])
        hidden = probabilities["hidden"].sum() if "hidden" in probabilities else structure.sizes.hidden
        return 1 - self.cost.expected(counts, hidden, present_L) / self.incoming.cost

    def gates(self) -> Mapping[tuple[int, str] | str, Gate]:
        """Returns the gates for `prune.masks.masks`: samples in training mode; without noise in evaluation mode and until then."""

        def gate_of(name: str) -> Gate:
            def gate(training: bool) -> Tensor:
                if training and self.drawn:
                    return self.drawn[name]
                return self.factor(fixed, name, self.named(self.log_alpha())[name])

            return gate

        found: dict[tuple[int, str] | str, Gate] = {}
        for name in self.sizes:
            what, _, block = name.rpartition("_")
            found[(int(block), what) if block.isdigit() else name] = gate_of(name)
        return found

    @torch.no_grad()
    def scores(self) -> Scores:
        """Returns P(z > 0) of heads and neurons; for blocks and channels the probability that the gate is more open than closed.

        Units without a mask get 1.
        """
        equal, log_alpha_N = Scores.equal(self.cost.structure, self.limits.inside), self.log_alpha().cpu()
        probabilities = self.named(present(log_alpha_N))
        opened = self.factors(torch.sigmoid, log_alpha_N)  # 1/2 where the gate without noise is 1/2
        components = {(block, what): probabilities.get(f"{what}_{block}", ones) for (block, what), ones in equal.components.items()}
        layers = torch.cat([opened.get(f"layer_{block}", one).cpu() for block, one in enumerate(torch.split(equal.layers, 1))])
        return Scores(components, layers, opened.get("hidden", equal.hidden))
