"""Tokens that the processes of a group share: each holds T = ceil(L / N) of the L tokens of every row, in order.

Around the layers that a group shares by heads and neurons (`foundation.models.architecture.split`), the sums of Megatron's split
become the two halves of such a sum (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2):

                     forward                                     backward
    gathered         all-gather      [b, T, D] -> [b, L, D]      reduce-scatter     what column layers read
    reduced          reduce-scatter  [b, L, D] -> [b, T, D]      all-gather         what a row layer computes
    own_tokens       own tokens      [b, L, D] -> [b, T, D]      all-gather         where the blocks begin
    all_tokens       all-gather      [b, T, D] -> [b, L, D]      own tokens         where they end, and all processes compute the same again
    read             the identity                                sum                weights that a process uses only on its own tokens

Where processes have whole layers and share only tokens (`foundation.models.architecture.context`), each of the N has the same loss and
adds 1 / N of it:

    parted           own tokens      [b, L, D] -> [b, T, D]      zeros but for own tokens
    joined           all-gather      [b, T, D] -> [b, L, D]      N times own tokens

so that the gradient of every weight is the sum over processes of what each has.

Only the sums are sent. A column layer keeps its own tokens for backward and gathers the others again then, so that
no process keeps whole states. If N does not divide L, tokens of zeros fill the last share; nobody reads them, and their gradients are 0.

Legend: b rows, L tokens, T tokens of a process, D channels, I inputs, O outputs of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional


def of_all_processes(own: Tensor, processes: int, group: Any) -> Tensor:
    """Returns the tensors of all processes of a group `[P, ...]`, which have one shape; without a gradient."""
    import torch.distributed as dist

    # of two names the newer one, of which older releases of torch know nothing
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    whole = own.new_empty(processes, *own.shape)
    all_gather(whole.flatten(0, 1), own.contiguous(), group=group)
    return whole


@dataclass(frozen=True)
class Group:
    """The processes that share tokens."""

    processes: int
    """How many they are."""
    rank: int = 0
    """Index of this one."""
    group: Any = None
    """Their process group. None: there are no others, and this process stands for each of them, to see what it takes and if it runs."""

    def share(self, length: int) -> int:
        """Returns T, of rows of so many tokens."""
        return -(-length // self.processes)

    def own(self, whole_bLD: Tensor) -> Tensor:
        """Returns the tokens of this process, `[b, T, D]`, in memory of their own."""
        length = whole_bLD.shape[1]
        share = self.share(length)
        start = min(self.rank * share, length)
        own_bTD = whole_bLD[:, start : start + share]
        missing = share - own_bTD.shape[1]
        return functional.pad(own_bTD, (0, 0, 0, missing)) if missing else own_bTD.clone(memory_format=torch.contiguous_format)

    def gather(self, own_bTD: Tensor, length: int) -> Tensor:
        """Returns the tokens of all processes, `[b, length, D]`."""
        if self.group is None:
            return torch.cat([own_bTD] * self.processes, dim=1)[:, :length]
        found_NbTD = of_all_processes(own_bTD, self.processes, self.group)
        share = own_bTD.shape[1]  # without those that fill up; no view, which `fully_shard` warns of
        return torch.cat([found_bTD[:, : max(0, length - place * share)] for place, found_bTD in enumerate(found_NbTD)], dim=1)

    def reduce_scatter(self, part_bLD: Tensor) -> Tensor:
        """Returns the sum over processes for the tokens of this one, `[b, T, D]`."""
        if self.group is None:
            return self.own(part_bLD)
        import torch.distributed as dist

        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        share = self.share(part_bLD.shape[1])
        padded_bLD = functional.pad(part_bLD, (0, 0, 0, share * self.processes - part_bLD.shape[1]))
        parts_NbTD = padded_bLD.reshape(padded_bLD.shape[0], self.processes, share, -1).movedim(1, 0).contiguous()
        own_bTD = torch.empty_like(parts_NbTD[0])
        reduce_scatter(own_bTD, parts_NbTD.flatten(0, 1), group=self.group)
        return own_bTD

    def total(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over processes of tensors of one dtype, by one message."""
        if self.group is None:
            return list(parts)
        import torch.distributed as dist

        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=self.group)
        sums = torch.split(flat, [part.numel() for part in parts])
        return [found.view_as(part) for found, part in zip(sums, parts, strict=True)]


class Reading:
    """One time that a column layer, or several next to each other, read hidden states of which each process has its tokens.

    Args:
        group: The processes.
        states_bTD: The tokens of this process.
        length: Tokens of a row.
    """

    def __init__(self, group: Group, states_bTD: Tensor, length: int) -> None:
        self.group, self.length = group, length
        self.own_bTD = states_bTD.detach()
        self.again_bLD: Tensor | None = None
        self.whole_bLD: Tensor = _Gathered.apply(states_bTD, self)  # type: ignore[no-untyped-call]
        """The tokens of all processes."""

    def product(self, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Returns `whole @ weight.T + bias`, `[b, L, O]`; for backward it stores only the tokens of this process."""
        if not torch.is_grad_enabled():
            return functional.linear(self.whole_bLD, weight_OI, bias_O)
        found: Tensor = _Product.apply(self.whole_bLD, self.own_bTD, weight_OI, bias_O, self)  # type: ignore[no-untyped-call]
        return found

    def close(self) -> None:
        """Forgets the tokens of the other processes, which only the layers read."""
        del self.whole_bLD, self.own_bTD

    def gathered_again(self, own_bTD: Tensor) -> Tensor:
        """Returns the tokens of all processes in the backward pass: gathered for the first layer, and kept for those next to it."""
        if self.again_bLD is None:
            self.again_bLD = self.group.gather(own_bTD, self.length)
        return self.again_bLD


class _Context(FunctionCtx):
    """Tensors that the forward pass stores for backward."""

    group: Group
    reading: Reading
    length: int
    parts: int
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, own_bTD: Tensor, reading: Reading) -> Tensor:
        """Returns the tokens of all processes."""
        ctx.reading = reading
        return reading.group.gather(own_bTD, reading.length)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient_bLD: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients for the own tokens; all layers that read them are through."""
        ctx.reading.again_bLD = None
        return ctx.reading.group.reduce_scatter(gradient_bLD), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, whole_bLI: Tensor, own_bTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, reading: Reading) -> Tensor:
        """Returns `whole @ weight.T + bias`."""
        ctx.reading = reading
        ctx.save_for_backward(own_bTI, weight_OI)
        return functional.linear(whole_bLI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient_bLO: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of what was read, of the weight and of the bias."""
        own_bTI, weight_OI = ctx.saved_tensors
        of_whole, _, of_weight, of_bias, _ = ctx.needs_input_grad
        gradient_RO = gradient_bLO.flatten(0, 1)
        weight_gradient = gradient_RO.T @ ctx.reading.gathered_again(own_bTI).flatten(0, 1) if of_weight else None
        return gradient_bLO @ weight_OI if of_whole else None, None, weight_gradient, gradient_RO.sum(0) if of_bias else None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, whole_bLD: Tensor, group: Group, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the own tokens, as `group.own` or `group.reduce_scatter` takes them."""
        ctx.group, ctx.length = group, whole_bLD.shape[1]
        return take(whole_bLD)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient_bTD: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient for the tokens of all processes."""
        return ctx.group.gather(gradient_bTD, ctx.length), None, None


class _All(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, own_bTD: Tensor, group: Group, length: int, parts: int) -> Tensor:
        """Returns the tokens of all processes."""
        ctx.group, ctx.parts = group, parts
        return group.gather(own_bTD, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient_bLD: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient for the own tokens: all processes have the same one for the whole, or for one of `parts` equal parts."""
        own_bTD = ctx.group.own(gradient_bLD)
        return own_bTD if ctx.parts == 1 else own_bTD * ctx.parts, None, None, None


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, whole_bLD: Tensor, group: Group) -> Tensor:
        """Returns the own tokens."""
        ctx.group, ctx.length = group, whole_bLD.shape[1]
        return group.own(whole_bLD)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient_bTD: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of the own tokens in their places."""
        before = min(ctx.group.rank * gradient_bTD.shape[1], ctx.length)
        own_bTD = gradient_bTD[:, : ctx.length - before]
        return functional.pad(own_bTD, (0, 0, before, ctx.length - before - own_bTD.shape[1])), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        """Returns views of the weights."""
        ctx.group = group
        ctx.set_materialize_grads(False)  # of a weight that is not used there is no gradient, as in one process
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the sums of the gradients."""
        used = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}  # the same in all processes
        found: list[Tensor | None] = [None] * len(gradients)
        for place, total in zip(used, ctx.group.total(list(used.values())) if used else (), strict=True):
            found[place] = total
        return None, *found


def reduced(part_bLD: Tensor, group: Group) -> Tensor:
    """Returns the sum over processes of what each has for all tokens, for the tokens of this one: `[b, T, D]`."""
    found: Tensor = _Shared.apply(part_bLD, group, group.reduce_scatter)  # type: ignore[no-untyped-call]
    return found


def own_tokens(whole_bLD: Tensor, group: Group) -> Tensor:
    """Returns the tokens of this process, `[b, T, D]`, of states that all processes have."""
    found: Tensor = _Shared.apply(whole_bLD, group, group.own)  # type: ignore[no-untyped-call]
    return found


def all_tokens(own_bTD: Tensor, group: Group, length: int) -> Tensor:
    """Returns the tokens of all processes, `[b, length, D]`, for a loss that all of them compute."""
    found: Tensor = _All.apply(own_bTD, group, length, 1)  # type: ignore[no-untyped-call]
    return found


def parted(whole_bLD: Tensor, group: Group) -> Tensor:
    """Returns the tokens of this process, `[b, T, D]`; the gradients of all processes add up to the gradient of the whole."""
    found: Tensor = _Parted.apply(whole_bLD, group)  # type: ignore[no-untyped-call]
    return found


def joined(own_bTD: Tensor, group: Group, length: int) -> Tensor:
    """Returns the tokens of all processes, `[b, length, D]`, for a loss of which each of them adds its part, 1 / N."""
    found: Tensor = _All.apply(own_bTD, group, length, group.processes)  # type: ignore[no-untyped-call]
    return found


def read(weights: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Returns weights of one dtype; their gradients, of the own tokens of each process, are summed over the processes by one message."""
    found: tuple[Tensor, ...] = _Read.apply(group, *weights)  # type: ignore[no-untyped-call]
    return found
