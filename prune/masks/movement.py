"""Structured movement: learn a score per head group and FFN neuron with the weights; units whose weights move to 0 are pruned.

    g_s = 1 for the units with the highest scores that fit the budget, 0 for the others          gate of unit s
    dL/dS_s = dL/dg_s = sum over the weights w that read s of w * dL/dw                           straight-through estimator
    cost(step) = 1 - t share(min(1, step / (warmup steps)))                                       budget, as a share (`prune.cubic`)

S accumulates -w dL/dw, so a score falls when the gradient shrinks the weights of its unit; units whose weights move away from 0 stay,
however small they are. The rows before a unit and the columns after it share one score: Lagunas et al. 2021,
https://arxiv.org/abs/2109.04838, section 3.2, after Sanh et al. 2020, https://arxiv.org/abs/2005.07683, sections 3 and 4.1. Every step
selects units exactly as surgery does at the end (`prune.selection`). Not supported: blocks of weights inside heads; soft thresholds, which
do not fix the budget.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from foundation.training.train import Batch, Objective
from prune.allocation import by_worth
from prune.cost import Component, CostModel, count_of
from prune.cubic import cubic
from prune.masks.joint import Scaled
from prune.masks.masks import Gate
from prune.selection import Incoming, Limits, Scores, select


class StructuredMovement(nn.Module):
    """The objective: the loss of the model with all but the selected units gated to 0.

    Args:
        loss: Computes the parts of the loss.
        cost: Cost of the incoming model.
        incoming: The incoming model, which shares refer to.
        sparsity: Share of its cost to remove.
        limits: What may be pruned: heads and FFN neurons.
        ratio: Learning rate of the scores divided by the learning rate of the weights.
        warmup: Fraction of the steps over which the sparsity rises.
        key: Key path of the stage, for messages.
    """

    def __init__(
        self, loss: Objective, cost: CostModel, incoming: Incoming, sparsity: float, limits: Limits, ratio: float, warmup: float, key: str
    ) -> None:
        super().__init__()
        self.loss, self.cost, self.incoming, self.sparsity, self.limits = loss, cost, incoming, sparsity, limits
        self.warmup, self.key = warmup, key
        sizes = cost.structure.sizes
        parts = [(block, what) for block in range(cost.structure.depth) for what in limits.inside if count_of(sizes, block, what)]
        free = [part for part in parts if part not in limits.protected]
        self.values = nn.ModuleDict({f"{what}_{block}": Scaled(torch.zeros(count_of(sizes, block, what)), ratio) for block, what in free})
        self.open: dict[str, Tensor] = {}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each."""
        self.choose(self.share(batch.step, batch.num_steps))
        return dict(self.loss(model, batch))

    def share(self, step: int, num_steps: int) -> float:
        """Returns the budget of a step, as a share of the cost."""
        done = min(1.0, (step + 1) / max(1.0, self.warmup * num_steps))
        return 1 - self.sparsity * cubic(done)

    def choose(self, share: float) -> None:
        """Selects the units with the highest scores that fit the budget, and sets their gates to 1."""
        scores = self.scores()
        kept = select(self.cost, self.incoming, share, self.limits, scores, by_worth(scores.components), self.key)
        for name, value in self.values.items():
            what, block = name.split("_")
            mask_S = torch.zeros_like(value.raw)  # type: ignore[arg-type]
            mask_S[list(getattr(kept, what)[int(block)])] = 1
            self.open[name] = mask_S

    def gates(self) -> Mapping[tuple[int, str] | str, Gate]:
        """Returns the gates for `prune.masks.masks`: 0 or 1, with a straight-through gradient to the score; 1 before the first choice."""

        def straight(name: str) -> Gate:
            def gate(training: bool) -> Tensor:
                score_S = self.values[name]()
                open_S = self.open[name] if self.open else torch.ones_like(score_S)
                gate_S: Tensor = open_S + score_S - score_S.detach()
                return gate_S

            return gate

        return {(int(name.split("_")[1]), name.split("_")[0]): straight(name) for name in self.values}

    @torch.no_grad()
    def scores(self) -> Scores:
        """Returns the scores, shifted so that the lowest is 0."""
        structure = self.cost.structure
        values: dict[tuple[int, Component], Tensor] = {
            (block, what): self.values[f"{what}_{block}"]().cpu() if f"{what}_{block}" in self.values else torch.zeros(0)
            for block in range(structure.depth)
            for what in self.limits.inside
        }
        lowest = min((float(value.min()) for value in values.values() if len(value)), default=0.0)
        known = {
            (block, what): value - lowest if len(value) else torch.zeros(count_of(structure.sizes, block, what))
            for (block, what), value in values.items()
        }
        return Scores(known, torch.ones(structure.depth), torch.ones(structure.sizes.hidden))
