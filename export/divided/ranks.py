"""All-reduce between the ranks of a divided model: sums and maxima of tensors of one shape.

    Processes   one process a rank, connected by `torch.distributed`: gloo between CPUs, NCCL between GPUs
    Meeting     one thread a rank in this process: for checks, without a network

Both give every rank the same bits: gloo and NCCL add up each element in one place and hand the sum out, a `Meeting` adds in order of rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of one model, as seen by one of them; all of them make the same calls in the same order."""

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of the tensors of all ranks, of the same shape and dtype; `part` may be overwritten."""

    def largest(self, part: Tensor) -> Tensor:
        """Returns the largest of the values of all ranks, element by element; `part` may be overwritten."""


class Processes:
    """The ranks are processes of the default group of `torch.distributed`."""

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of the tensors of all processes."""
        if part.numel():  # an expert may have no tokens, on all ranks alike
            torch.distributed.all_reduce(part)
        return part

    def largest(self, part: Tensor) -> Tensor:
        """Returns the largest of the values of all processes, element by element."""
        if part.numel():
            torch.distributed.all_reduce(part, torch.distributed.ReduceOp.MAX)
        return part


class Meeting:
    """The ranks are threads of this process, which meet wherever they exchange something.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[Tensor] = [torch.empty(0)] * size

    def of(self, rank: int) -> Ranks:
        """Returns the ranks as seen by one of them."""
        return _Seat(self, rank)

    def together(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Runs one task a rank, each in a thread of its own, without gradients; returns what they return, in order of rank.

        Raises:
            Exception: The exception of the first rank that failed; the others end with it.
        """
        results: list[list[T]] = [[] for _ in tasks]
        errors: list[Exception] = []

        def run(rank: int) -> None:
            try:
                with torch.inference_mode():  # a mode of threads
                    results[rank].append(tasks[rank]())
            except threading.BrokenBarrierError:  # another rank failed, which is reported
                pass
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(tasks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.barrier.reset()
            raise errors[0]
        return [result[0] for result in results]


class _Seat:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def sum(self, part: Tensor) -> Tensor:
        return self._joined(part, lambda one, other: one.add_(other))

    def largest(self, part: Tensor) -> Tensor:
        return self._joined(part, lambda one, other: torch.maximum(one, other, out=one))

    def _joined(self, part: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns the parts of all ranks, joined one after the other."""
        meeting = self.meeting
        meeting.parts[self.rank] = part
        meeting.barrier.wait()
        first, *others = meeting.parts
        total = first.clone()
        for other in others:
            total = join(total, other)
        meeting.barrier.wait()  # no rank puts down its next part before all have read this one
        return total
