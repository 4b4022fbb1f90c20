"""Movement pruning: learn which weights to zero from whether training moves them away from 0 (Sanh et al. 2020,
https://arxiv.org/abs/2005.07683, sections 4 and 5).

    W' = W * M,   M = 1[S among the v highest scores of its layer]
    dL/dW = dL/dW' * M,    dL/dS = dL/dW' * W        straight-through: S falls if a step would move w towards 0

For block patterns a score belongs to a block, and its gradient is summed over the block (Lagunas et al. 2021,
https://arxiv.org/abs/2109.04838, section 3.2). Ties, as at the start, keep the first weights. The sparsity follows `prune.cubic` between a
warm-up without zeros and a cool-down with all of them:

    s(t) = s share(p),   p = clamp((t - t_w) / (T - t_w - t_c), 0, 1)

Scores are parameters of the layers, trained with the weights. Only their order matters, so under an optimizer that normalizes gradients
their learning rate does not. Weight decay would change the order, since it shrinks large scores more: scores are stored flat, and
1-dimensional parameters have no weight decay (`foundation.training.train`). Not supported: the soft threshold (section 4, SMvP), which does
not fix the sparsity in advance; N:M; comparing scores between layers.

Tensor names carry their shapes: O outputs, I inputs, S x T blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.training.train import Batch, Objective
from prune.cubic import cubic
from prune.sparsify.patterns import Blocks, Unstructured, block_sizes, block_sums, highest_blocks, mask, num_zeros, spread

Movable = Unstructured | Blocks


class MaskedWeight(torch.autograd.Function):
    """W * M with the straight-through gradients above."""

    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, scores: Tensor, kept_OI: Tensor, pattern: Movable) -> Tensor:
        """Returns W', float32 `[O, I]`.

        Args:
            ctx: Stores tensors for the backward pass.
            weight_OI: float32.
            scores: float32 `[O * I]`, or `[S * T]` for blocks.
            kept_OI: The mask M, bool.
            pattern: The sparsity pattern that the scores belong to.
        """
        ctx.save_for_backward(weight_OI, kept_OI)
        ctx.pattern = pattern
        return weight_OI * kept_OI

    @staticmethod
    def backward(ctx: Any, gradient_OI: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`."""
        weight_OI, kept_OI = ctx.saved_tensors
        moved_OI = gradient_OI * weight_OI
        moved = block_sums(moved_OI, ctx.pattern) if isinstance(ctx.pattern, Blocks) else moved_OI
        return gradient_OI * kept_OI, moved.flatten(), None, None


class ScoredLinear(nn.Linear):
    """A linear layer with a learned mask.

    Args:
        linear: The layer whose parameters it takes over.
        pattern: The sparsity pattern.
    """

    kept_OI: Tensor

    def __init__(self, linear: nn.Linear, pattern: Movable) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.pattern = linear.weight, linear.bias, pattern
        self.grid = block_sizes(linear.weight.shape, pattern).shape if isinstance(pattern, Blocks) else linear.weight.shape
        self.scores = nn.Parameter(torch.zeros(self.grid.numel(), device=linear.weight.device))  # flat: no weight decay
        self.register_buffer("kept_OI", torch.ones_like(linear.weight, dtype=torch.bool), persistent=False)  # derived from the scores

    def choose(self, sparsity: float) -> None:
        """Updates the mask from the scores."""
        scores, shape = self.scores.detach().reshape(self.grid), self.weight.shape
        if isinstance(self.pattern, Blocks):
            stays_ST = highest_blocks(scores, shape, self.pattern, num_zeros(sparsity, shape.numel()))
            self.kept_OI = spread(stays_ST, shape, self.pattern)
        else:
            self.kept_OI = mask(scores, self.pattern, sparsity)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output `[..., O]` for an input `[..., I]`."""
        weight_OI: Tensor = MaskedWeight.apply(self.weight, self.scores, self.kept_OI, self.pattern)  # type: ignore[no-untyped-call]
        return functional.linear(x, weight_OI, self.bias)


class Movement(nn.Module):
    """The objective of movement pruning: the objective of the task on the masked weights; the sparsity rises over the steps.

    Args:
        objective: The objective of the task.
        sparsity: Sparsity at the end.
        warmup: Share of the steps at the start without zeros.
        cooldown: Share of the steps at the end with all zeros.
    """

    def __init__(self, objective: Objective, sparsity: float, warmup: float, cooldown: float) -> None:
        super().__init__()
        self.objective, self.sparsity, self.warmup, self.cooldown = objective, sparsity, warmup, cooldown
        self.step = -1

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each."""
        if batch.step != self.step:  # scores only change between steps
            self.step = batch.step
            share = self.sparsity * rising(batch.step, batch.num_steps, self.warmup, self.cooldown)
            for layer in scored_layers(model).values():
                layer.choose(share)
        return self.objective(model, batch)


def rising(step: int, num_steps: int, warmup: float, cooldown: float) -> float:
    """Returns the share of the final sparsity in step `step` (from 0) of `num_steps`: 0 in the warm-up, 1 in the cool-down."""
    start, stop = warmup * num_steps, (1 - cooldown) * num_steps
    done = min(1.0, max(0.0, (step - start) / max(stop - start, 1e-9)))
    return cubic(done)


def insert(model: nn.Module, names: Iterable[str], pattern: Movable) -> None:
    """Replaces linear layers by `ScoredLinear`, in place."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
        model.set_submodule(name, ScoredLinear(linear, pattern).train(linear.training))


def extract(model: nn.Module, sparsity: float) -> None:
    """Replaces every `ScoredLinear` by a linear layer with its zeros, in place."""
    for name, layer in scored_layers(model).items():
        layer.choose(sparsity)
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        linear.weight, linear.bias = layer.weight, layer.bias
        linear.weight.data = layer.weight.detach() * layer.kept_OI
        model.set_submodule(name, linear.train(layer.training))


def scored_layers(model: nn.Module) -> dict[str, ScoredLinear]:
    """Returns the layers with learned masks, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ScoredLinear)}
