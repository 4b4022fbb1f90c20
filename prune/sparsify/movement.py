"""Movement: which weights go is learned with them, from whether training moves them away from 0 (Sanh et al. 2020,
https://arxiv.org/abs/2005.07683, sections 4 and 5).

    W' = W * M,   M = 1[S among the v highest scores of its layer]
    dL/dW = dL/dW' * M,    dL/dS = dL/dW' * W        straight through the choice: S falls where a step would bring w nearer to 0

With blocks a score stands for a block and gets the sum over it (Lagunas et al. 2021, https://arxiv.org/abs/2109.04838, section 3.2). Of
equal scores, as at the start, the first ones stay. The share of zeros follows `prune.cubic` between a warm-up without zeros and a
cool-down with all of them:

    s(t) = s share(p),   p = clamp((t - t_w) / (T - t_w - t_c), 0, 1)

Scores are parameters of the layers, trained with the weights. Only their order counts, so that their learning rate, with an optimizer that
divides by the size of gradients, does not. Weight decay would change the order, taking more from large scores: they are stored flat, and
parameters of one dimension have none (`compress.training.train`). Left out: the soft threshold (section 4, SMvP), which does not say
beforehand how many zeros there will be; N:M; scores compared between layers.

Tensor names carry their shapes: O outputs, I inputs, S x T blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.measure.closeness import place
from compress.training.train import Batch, Objective
from prune.cubic import cubic
from prune.sparsify.patterns import Blocks, Unstructured, block_sizes, block_sums, highest_blocks, mask, num_zeros, spread

Movable = Unstructured | Blocks


class MaskedWeight(torch.autograd.Function):
    """W * M, with the gradients above."""

    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, scores: Tensor, kept_OI: Tensor, pattern: Movable) -> Tensor:
        """Returns W', float32 `[O, I]`.

        Args:
            ctx: What backward gets.
            weight_OI: float32.
            scores: float32 `[O * I]`, or `[S * T]` for blocks.
            kept_OI: bool: M.
            pattern: What a score stands for.
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


class MovedLinear(nn.Linear):
    """A linear layer whose zeros are learned.

    Args:
        linear: The layer whose parameters it takes over.
        pattern: What a score stands for.
    """

    kept_OI: Tensor

    def __init__(self, linear: nn.Linear, pattern: Movable) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.pattern = linear.weight, linear.bias, pattern
        self.grid = block_sizes(linear.weight.shape, pattern).shape if isinstance(pattern, Blocks) else linear.weight.shape
        self.scores = nn.Parameter(torch.zeros(self.grid.numel(), device=linear.weight.device))  # flat: no weight decay
        self.register_buffer("kept_OI", torch.ones_like(linear.weight, dtype=torch.bool), persistent=False)  # follows from the scores

    def choose(self, sparsity: float) -> None:
        """Chooses which weights stay."""
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
    """The objective of a training in which zeros are learned: that of the task, on the weights that stay at each step.

    Args:
        objective: The objective of the task.
        sparsity: Share of the weights that are zero at the end.
        warmup: Share of the steps without zeros at the start.
        cooldown: Share of the steps with all of them at the end.
    """

    def __init__(self, objective: Objective, sparsity: float, warmup: float, cooldown: float) -> None:
        super().__init__()
        self.objective, self.sparsity, self.warmup, self.cooldown = objective, sparsity, warmup, cooldown
        self.step = -1

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the parts of the loss, float32 `[b]` each."""
        if batch.step != self.step:  # scores change between steps alone
            self.step = batch.step
            share = self.sparsity * rising(batch.step, batch.num_steps, self.warmup, self.cooldown)
            for layer in moved_layers(model).values():
                layer.choose(share)
        return self.objective(model, batch)


def rising(step: int, num_steps: int, warmup: float, cooldown: float) -> float:
    """Returns the share of the zeros that there are in step `step` (from 0) of `num_steps`: 0 in the warm-up, 1 in the cool-down."""
    start, stop = warmup * num_steps, (1 - cooldown) * num_steps
    done = min(1.0, max(0.0, (step - start) / max(stop - start, 1e-9)))
    return cubic(done)


def insert(model: nn.Module, names: Iterable[str], pattern: Movable) -> None:
    """Replaces linear layers by `MovedLinear`, in place."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
        place(model, name, MovedLinear(linear, pattern).train(linear.training))


def extract(model: nn.Module, sparsity: float) -> None:
    """Replaces every `MovedLinear` by a linear layer with its zeros, in place."""
    for name, layer in moved_layers(model).items():
        layer.choose(sparsity)
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        linear.weight, linear.bias = layer.weight, layer.bias
        linear.weight.data = layer.weight.detach() * layer.kept_OI
        place(model, name, linear.train(layer.training))


def moved_layers(model: nn.Module) -> dict[str, MovedLinear]:
    """Returns the layers whose zeros are learned, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MovedLinear)}
