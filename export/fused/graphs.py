"""CUDA graphs: a whole forward pass as one launch, recorded once for each size that rows are filled up to.

    sizes        sequences: the batch sizes; tokens: batch size x each length, and powers of two below the largest
    a batch      goes to the smallest size that holds its sequences and its tokens; it is copied into the inputs of the recording
    too large    runs kernel by kernel

Rows without padding are what makes the sizes by tokens worth it: 8 rows of 20 tokens need 256, not 8 x 128.

A recording is made at the first batch of its size, or all of them by `prepare`: the pass runs first, so that kernels are compiled and tiles
measured, which a recording must not do. Recordings keep their memory; the least recently used ones are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from export.fused.rows import Rows, filled

FEWEST_TOKENS = 16
MOST_RECORDINGS = 64
WARM_UP = 3


@dataclass(frozen=True, order=True)
class Size:
    """Capacity of a recording."""

    tokens: int
    sequences: int


class Recording(Protocol):
    """A recorded pass."""

    def replay(self) -> Tensor:
        """Runs it on what its inputs hold now; returns its output, which the next run overwrites."""


Record = Callable[[Callable[[], Tensor]], Recording]
"""Records a pass: it is called, and called again while it is recorded."""


def sizes_of(batch_sizes: Sequence[int], lengths: Sequence[int]) -> tuple[Size, ...]:
    """Returns the sizes that are recorded, ascending.

    Args:
        batch_sizes: Sequences of a batch.
        lengths: Tokens of a padded row.
    """
    found = set()
    for sequences in batch_sizes:
        most = sequences * max(lengths)
        steps = {1 << power for power in range(FEWEST_TOKENS.bit_length() - 1, most.bit_length())}
        tokens = {*(sequences * length for length in lengths), *(step for step in steps if sequences <= step < most)}
        found |= {Size(count, sequences) for count in tokens}
    return tuple(sorted(found))


def smallest(sizes: Sequence[Size], tokens: int, sequences: int) -> Size | None:
    """Returns the first size that holds so many tokens and sequences; None where none does."""
    return next((size for size in sorted(sizes) if size.tokens >= tokens and size.sequences >= sequences), None)


class Graphs:
    """Forward passes, recorded by size.

    Args:
        forward: The pass: rows on the device to logits float32 `[B, C]`.
        sizes: What is recorded.
        device: Where.
        record: Records a pass.
    """

    def __init__(self, forward: Callable[[Rows], Tensor], sizes: Sequence[Size], device: torch.device, record: Record) -> None:
        self._forward, self._sizes, self._device, self._record = forward, tuple(sizes), device, record
        self._recorded: OrderedDict[Size, tuple[Rows, Recording]] = OrderedDict()

    def __call__(self, rows: Rows) -> Tensor:
        """Returns the logits of rows on the CPU: float32 `[B, C]` on the device, until the next call."""
        size = smallest(self._sizes, len(rows.word), rows.sequences)
        if size is None:
            return self._forward(rows.to(self._device))
        return self.loaded(rows, size).replay()[: rows.sequences]

    def loaded(self, rows: Rows, size: Size) -> Recording:
        """Returns the recording of a size, whose inputs hold rows of the CPU that fit it."""
        given = filled(rows, size.tokens, size.sequences)
        inputs, recording = self._recording(size, given)
        for name, tensor in given.tensors.items():
            getattr(inputs, name).copy_(tensor, non_blocking=True)
        return recording

    def prepare(self, row: Rows) -> None:
        """Records every size, so that no batch waits for that.

        Args:
            row: Any row, on the CPU, that is no larger than the smallest size.
        """
        for size in self._sizes:
            self._recording(size, filled(row, size.tokens, size.sequences))

    def _recording(self, size: Size, rows: Rows) -> tuple[Rows, Recording]:
        """Returns the inputs and the recording of a size, made of these rows where there is none."""
        if size not in self._recorded:
            inputs = rows.to(self._device)
            self._recorded[size] = inputs, self._record(lambda: self._forward(inputs))
            while len(self._recorded) > MOST_RECORDINGS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(size)
        return self._recorded[size]


class CudaGraph:
    """A recording on a GPU.

    Args:
        graph: The graph of torch.
        output: What it writes.
        work: The pass; stored, because the graph reads its tensors in place.
    """

    def __init__(self, graph: Any, output: Tensor, work: Callable[[], Tensor]) -> None:
        self._graph, self._output, self._work = graph, output, work

    def replay(self) -> Tensor:
        """Launches the graph on the current stream."""
        self._graph.replay()
        return self._output


def record_on_gpu(work: Callable[[], Tensor]) -> CudaGraph:
    """Records a pass as a CUDA graph: after some runs on a stream of its own, as torch asks for."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return CudaGraph(graph, output, work)
