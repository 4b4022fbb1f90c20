"""Joint: masks over heads, neurons, blocks and channels are learned together with the weights (CoFi).

Each mask has a hard concrete gate z (`prune.hard_concrete`), which what it stands for is multiplied by:

    group h of heads of block i   z_h,i        neuron n of block i   z_n,i        block i   z_layer,i        channel c   z_c
    C(z) = cost of the blocks of the expected sizes (`prune.cost`, or milliseconds of the latency table), C(1) that of the incoming model
    t(step) = t min(1, step / (warmup steps)),   t the sparsity asked for,   s = 1 - C(z) / C(1)
    min L over weights and masks, subject to s = t(step)

L is the objective of `prune.recovery`. No weight can hold the gate of a block, so that in the last quarter of the steps each block is there
or not: the ones that selection would keep. Masks have a rate of their own, and Adam. Xia et al. 2022, https://arxiv.org/abs/2204.00408,
sections 3.1 and 3.2; there the constraint is kept by multipliers that are learned along, here by `prune.price`. Afterwards units are ranked
by P(z > 0) and chosen by `prune.selection`, which keeps to the budget exactly. Left out: gates of whole attentions and whole FFNs, as one
group and one step of neurons stay anyway (no architecture here has less), and in half an epoch of SST-2 they closed whole FFNs where some
neurons of each would do; a searched map of layers, as those of the student are those of the incoming model: each learns from the one that
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.core.config import Config
from compress.training.train import Batch, Objective
from prune.cost import Component, Costs, count_of
from prune.hard_concrete import BOUND, OPEN, draw, fixed, present
from prune.masks import Gate
from prune.price import Price
from prune.selection import Limits, Scores, Whole, likely_blocks

MASK_RATE, CROSSINGS = 0.01, 4
"""Learning rate of masks at the least, and how many times a gate can go from open to closed in one training."""
DECIDED = 0.25
"""Share of the steps, at the end, in which a block is there or not."""
UNDECIDED = -1.0


class Learn(Config):
    """How masks are learned, by joint and movement; what the loss is stands in `recover`."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 2
    """Passes over the train split; 0.5 is half a pass."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-5
    """Peak learning rate of the weights."""
    mask_learning_rate: Annotated[float, Field(gt=0, le=100)] | None = None
    """That of masks; absent: 0.01, or what lets a mask open and close four times in so many steps, where that is more."""
    warmup: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the steps over which the sparsity rises to what is asked for: linearly with joint, as `cubic` with movement."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows in memory at once, where a whole batch does not fit."""


def mask_rate(settings: Learn, num_steps: int) -> float:
    """Returns the learning rate of masks with the default resolved."""
    return settings.mask_learning_rate or max(MASK_RATE, CROSSINGS * 2 * OPEN / max(1, num_steps))


class Scaled(nn.Module):
    """A vector that is learned at another rate than the weights: Adam moves `raw` by one rate, and the value is `ratio` times that.

    Args:
        value: What it begins with, float32 `[n]`.
        ratio: Its rate divided by that of the weights.
    """

    def __init__(self, value: Tensor, ratio: float) -> None:
        super().__init__()
        self.raw, self.ratio = nn.Parameter(value / ratio), ratio
        # Adam's steps do not depend on the size of a gradient, but the clipping of all gradients together does: it sees that of the value.
        self.raw.register_hook(lambda gradient: gradient / ratio)  # type: ignore[no-untyped-call]

    def forward(self) -> Tensor:
        """Returns the vector, float32 `[n]`."""
        return self.raw * self.ratio

    def bound(self, most: float) -> None:
        """Puts entries back that went beyond `most`."""
        with torch.no_grad():
            self.raw.clamp_(-most / self.ratio, most / self.ratio)


class Joint(nn.Module):
    """The objective: the loss of the masked model, and what it costs.

    Args:
        loss: Gives the parts of the loss.
        cost: Of the model that comes in.
        whole: What shares are taken of.
        sparsity: Share of it that is to go; as much of it as gates can come to, which are never quite certain.
        limits: What may be masked; something has to be free.
        ratio: Rate of masks divided by that of the weights.
        warmup: Fraction of the steps over which the sparsity rises.
    """

    decided_L: Tensor

    def __init__(self, loss: Objective, cost: Costs, whole: Whole, sparsity: float, limits: Limits, ratio: float, warmup: float) -> None:
        super().__init__()
        self.loss, self.cost, self.whole, self.sparsity, self.limits, self.warmup = loss, cost, whole, sparsity, limits, warmup
        structure = cost.structure
        self.sizes: dict[str, int] = {}
        for block in range(structure.depth):
            for what in limits.inside:
                if (block, what) not in limits.protected:
                    self.sizes[f"{what}_{block}"] = count_of(structure.sizes, block, what)
            if "layers" in limits.granularity and block not in limits.blocks:
                self.sizes[f"layer_{block}"] = 1
        if "hidden" in limits.granularity:
            self.sizes["hidden"] = structure.sizes.hidden
        num_masks = sum(self.sizes.values())
        self.log_alpha, self.price = Scaled(torch.full((num_masks,), OPEN), ratio), Price(num_masks)
        self.register_buffer("decided_L", torch.full((structure.depth,), UNDECIDED))
        self.sparsity = min(sparsity, float(self.gone(torch.full((num_masks,), -BOUND))))
        self.drawn: dict[str, Tensor] = {}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each; new gates are drawn for every batch."""
        self.log_alpha.bound(BOUND)
        if "layers" in self.limits.granularity and batch.step >= (1 - DECIDED) * batch.num_steps and not self.decided:
            self.decide()
        penalty = self.penalty(batch.step, batch.num_steps)
        seen_N = self.log_alpha()
        seen_N.register_hook(self.price.see)  # of the loss alone: the penalty has a branch of its own
        self.drawn = self.factors(draw, seen_N)
        return {**self.loss(model, batch), "sparsity": penalty.expand(len(batch.indices))}

    @torch.no_grad()
    def decide(self) -> None:
        """Has the blocks that selection would keep be there from now on, and the others not."""
        kept = likely_blocks(self.cost, self.whole, self.limits, self.scores(), (1 - self.sparsity) * self.whole.cost)
        self.decided_L.zero_()
        self.decided_L[kept] = 1

    @property
    def decided(self) -> bool:
        """Whether it is settled which blocks are there."""
        return bool(self.decided_L[0] != UNDECIDED)

    def named(self, values_N: Tensor) -> dict[str, Tensor]:
        """Returns the values of all masks by the name of the gate, `[n]` each."""
        return dict(zip(self.sizes, torch.split(values_N, list(self.sizes.values())), strict=True))

    def factors(self, of: Callable[[Tensor], Tensor], log_alpha_N: Tensor) -> dict[str, Tensor]:
        """Returns what is made of all masks by the name of the gate, float32 `[n]` each; 0 or 1 for blocks that are decided."""
        return {name: self.factor(of, name, mask) for name, mask in self.named(log_alpha_N).items()}

    def factor(self, of: Callable[[Tensor], Tensor], name: str, mask: Tensor) -> Tensor:
        """Returns what is made of one of them, float32 `[n]`."""
        what, _, block = name.rpartition("_")
        return self.decided_L[int(block)][None] if what == "layer" and self.decided else of(mask)

    def target(self, step: int, num_steps: int) -> float:
        """Returns the share that is to be gone in a step."""
        return self.sparsity * min(1.0, (step + 1) / max(1.0, self.warmup * num_steps))

    def penalty(self, step: int, num_steps: int) -> Tensor:
        """Returns what is added to the loss of each row, float32 `[]`: what is there beyond what was asked for, at its price."""
        log_alpha_N, target = self.log_alpha(), self.target(step, num_steps)
        gone = self.gone(log_alpha_N)
        slope_N = torch.zeros_like(log_alpha_N)
        if gone.requires_grad:  # not where blocks alone are masked, and all are decided
            (slope_N,) = torch.autograd.grad(gone, log_alpha_N, retain_graph=True)
        return self.price.settle(step, float(gone.detach()) - target, slope_N) * (target - gone)

    def expected_sparsity(self) -> float:
        """Returns the share of the cost that is gone with the expected sizes."""
        return float(self.gone(self.log_alpha()).detach())

    def gone(self, log_alpha_N: Tensor) -> Tensor:
        """Returns the share of the cost that is gone with the expected sizes, float32 `[]`."""
        structure = self.cost.structure
        chances = self.factors(present, log_alpha_N)
        counts: dict[tuple[int, Component], Tensor] = {}
        for block in range(structure.depth):
            for what in self.limits.inside:
                if f"{what}_{block}" in chances:
                    counts[block, what] = chances[f"{what}_{block}"].sum()
        certain = log_alpha_N.new_ones(1)
        present_L = torch.cat([chances.get(f"layer_{block}", certain) for block in range(structure.depth)])
        hidden = chances["hidden"].sum() if "hidden" in chances else structure.sizes.hidden
        return 1 - self.cost.expected(counts, hidden, present_L) / self.whole.cost

    def gates(self) -> Mapping[tuple[int, str] | str, Gate]:
        """Returns the gates of a model, as `prune.masks` takes them: drawn in training, without noise otherwise."""

        def gate_of(name: str) -> Gate:
            return lambda training: self.drawn[name] if training else self.factor(fixed, name, self.named(self.log_alpha())[name])

        found: dict[tuple[int, str] | str, Gate] = {}
        for name in self.sizes:
            what, _, block = name.rpartition("_")
            found[(int(block), what) if block.isdigit() else name] = gate_of(name)
        return found

    @torch.no_grad()
    def scores(self) -> Scores:
        """Returns the probability of heads and neurons to be there, and of blocks and channels to be rather open than closed.

        What is not masked has 1.
        """
        equal, log_alpha_N = Scores.equal(self.cost.structure, self.limits.inside), self.log_alpha().cpu()
        chances = self.named(present(log_alpha_N))
        opened = self.factors(torch.sigmoid, log_alpha_N)  # a half where the gate without noise is a half
        components = {(block, what): chances.get(f"{what}_{block}", ones) for (block, what), ones in equal.components.items()}
        layers = torch.cat([opened.get(f"layer_{block}", one).cpu() for block, one in enumerate(torch.split(equal.layers, 1))])
        return Scores(components, layers, opened.get("hidden", equal.hidden))
