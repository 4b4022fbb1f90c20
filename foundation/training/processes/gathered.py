"""Vectors that several processes compare: every process gets the vectors of all, and gradients go back to where a vector was made.

    forward     each process sends its vectors and their labels to all others (all_gather)
    loss        each computes the losses of its own rows, against the rows of all
    backward    d loss / d v = sum over processes of d loss_process / d v   (all_reduce, of which a process keeps its own rows)

So the sum of the losses over the processes, and its gradient, equal the loss and gradient of one process that has the whole batch. OpenAI
trained CLIP so (https://arxiv.org/abs/2103.00020, section 2.5: each GPU computes the similarities of its own part); sentence-transformers
calls it `gather_across_devices`. Only vectors travel, a few numbers for each row. What is one number for the whole batch, such as a mean,
is summed over the processes in the same way (`Gathered.total`).

Left out: a reduce-scatter in place of the sum, which gloo does not have; it would halve what backward sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundation.machine.parallel import Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_ROW = -1
"""First label value of a filler row: it runs only for the collectives, in a process without rows of the batch."""


@dataclass(frozen=True)
class Gathered:
    """The rows of a batch of all processes, in the order of the processes."""

    vectors_nD: Tensor
    """Vectors, float32; their gradients reach the processes that made them."""
    labels_nk: Tensor
    """Labels, float32."""
    own_n: Tensor
    """Mask of the gathered rows that this process owns, bool."""
    counted_b: Tensor
    """Their row numbers in this process, int64."""
    num_rows: int
    """Rows of this process, counted or not."""
    group: ProcessGroup | None
    """The process group of those that have them."""

    def own(self, losses_n: Tensor) -> Tensor:
        """Returns the losses of the rows of this process, float32 `[b]`; 0 for those that do not count."""
        losses_b = torch.zeros(self.num_rows, device=losses_n.device, dtype=losses_n.dtype)
        return losses_b.index_add(0, self.counted_b, losses_n[self.own_n])

    def total(self, values: Tensor) -> Tensor:
        """Returns the sums of numbers over the processes, with their gradients; all processes must call it, and backward of the result."""
        total: Tensor = _Total.apply(values, self.group)  # type: ignore[no-untyped-call]
        return total


def gathered(vectors_bD: Tensor, labels_bk: Tensor, team: Team, counts: bool | None = None) -> Gathered:
    """Returns the rows of all processes; all processes must call it, and call backward of what they compute from it.

    Args:
        vectors_bD: Vectors of the rows of this process.
        labels_bk: Their labels, or what else belongs to each row and has no gradient, float32.
        team: The processes; those that hold one model together have the same rows, and gather only from the others.
        counts: Whether the rows of this process count; others are left out. None: those do whose first label is not `NO_ROW`.
    """
    import torch.distributed as dist

    group = team.data_group()
    counted_b = torch.nonzero(labels_bk[:, 0] != NO_ROW)[:, 0]
    if counts is not None:
        counted_b = torch.arange(len(labels_bk) if counts else 0, device=labels_bk.device)
    rows_bE = torch.cat([vectors_bD.float(), labels_bk], dim=1)[counted_b]
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows_bE.device) for _ in range(team.data_size)]
    dist.all_gather(sizes, torch.tensor([len(counted_b)], device=rows_bE.device), group=group)
    each = torch.cat(sizes).tolist()
    rank = dist.get_rank(group)
    whole_nE = _AllRows.apply(rows_bE, each, rank, group)  # type: ignore[no-untyped-call]
    width = vectors_bD.shape[1]
    own_n = torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)).to(rows_bE.device) == rank
    return Gathered(whole_nE[:, :width], whole_nE[:, width:].detach(), own_n, counted_b, len(labels_bk), group)


class _AllRows(torch.autograd.Function):
    """The rows of all processes, `[n, E]`, from the rows of one `[b, E]`; processes may have different numbers of them."""

    @staticmethod
    def forward(ctx: Any, rows_bE: Tensor, counts: Sequence[int], rank: int, group: ProcessGroup | None) -> Tensor:
        import torch.distributed as dist

        ctx.own, ctx.group = slice(sum(counts[:rank]), sum(counts[: rank + 1])), group
        padded = rows_bE.new_zeros(max(counts), rows_bE.shape[1])  # a collective takes equal shapes
        padded[: len(rows_bE)] = rows_bE
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(gradients[0], ctx.group)[ctx.own], None, None, None


class _Total(torch.autograd.Function):
    """The sum of numbers over the processes; what each of them computes from it depends on the numbers of all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the sum over the processes; the argument stays as it is, because autograd may use it elsewhere."""
    import torch.distributed as dist

    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
