"""Recordings by size: the smallest that fits, made once, filled anew for each batch, dropped when there are too many."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from export.fused import graphs
from export.fused.graphs import Graphs, Size, sizes_of, smallest
from export.fused.rows import Limits, Rows, pack

CPU = torch.device("cpu")


class Recorded:
    """Stands for a CUDA graph: the same memory in, the same memory out."""

    made: ClassVar[list["Recorded"]] = []

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.output, self.replays = work, work(), 0
        Recorded.made.append(self)

    def replay(self) -> Tensor:
        self.replays += 1
        return self.output.copy_(self.work())


@pytest.fixture(autouse=True)
def none_made() -> None:
    Recorded.made = []


def rows_of(*lengths: int) -> Rows:
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.arange(mask.size).reshape(mask.shape) % 90 + 1
    return pack({"input_ids": ids, "attention_mask": mask}, Limits(100, 1, 1000, 0))


def sums(rows: Rows) -> Tensor:
    """A pass that is easily told: the sum of the ids of every sequence."""
    total = torch.nn.functional.pad(rows.word.cumsum(0), (1, 0))
    return (total[rows.start[1:].long()] - total[rows.start[:-1].long()]).float()[:, None]


def test_sizes_are_those_of_the_target_and_powers_of_two() -> None:
    assert sizes_of((1, 8), (32, 100)) == tuple(
        sorted([
            *(Size(tokens, 1) for tokens in (16, 32, 64, 100)),
            *(Size(tokens, 8) for tokens in (16, 32, 64, 128, 256, 512, 800)),
        ])
    )  # fmt: skip
    assert sizes_of((64,), (1,)) == (Size(64, 64),)


@given(st.integers(1, 900), st.integers(1, 9))
def test_the_smallest_size_that_fits(tokens: int, sequences: int) -> None:
    sizes = sizes_of((1, 3, 8), (32, 100))
    fitting = [size for size in sizes if size.tokens >= tokens and size.sequences >= sequences]
    found = smallest(sizes, tokens, sequences)
    assert (found is None) == (not fitting)
    assert found is None or (found.tokens, found.sequences) == min((size.tokens, size.sequences) for size in fitting)


def test_a_recording_serves_every_batch_of_its_size() -> None:
    run = Graphs(sums, (Size(8, 2), Size(16, 4)), CPU, Recorded)
    for lengths in ((3, 2), (5, 3), (8,)):
        assert torch.equal(run(rows_of(*lengths)), sums(rows_of(*lengths)))
    assert [recorded.replays for recorded in Recorded.made] == [3]
    assert torch.equal(run(rows_of(1, 1, 1)), sums(rows_of(1, 1, 1)))
    assert [recorded.replays for recorded in Recorded.made] == [3, 1]


def test_all_sizes_can_be_recorded_before_the_first_batch() -> None:
    run = Graphs(sums, (Size(8, 2), Size(16, 4)), CPU, Recorded)
    run.prepare(rows_of(1))
    assert [recorded.output.shape for recorded in Recorded.made] == [(2, 1), (4, 1)]
    for lengths in ((3, 2), (5, 6)):
        assert torch.equal(run(rows_of(*lengths)), sums(rows_of(*lengths)))
    assert [recorded.replays for recorded in Recorded.made] == [1, 1]


def test_what_fits_no_size_runs_as_it_is() -> None:
    run = Graphs(sums, (Size(8, 2),), CPU, Recorded)
    for lengths in ((9,), (1, 1, 1)):
        assert torch.equal(run(rows_of(*lengths)), sums(rows_of(*lengths)))
    assert Recorded.made == []


def test_the_least_recently_used_recording_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_RECORDINGS", 2)
    run = Graphs(sums, [Size(tokens, 1) for tokens in (1, 2, 3)], CPU, Recorded)
    for length in (1, 2, 1, 3, 1, 2):
        assert torch.equal(run(rows_of(length)), sums(rows_of(length)))
    assert [recorded.replays for recorded in Recorded.made] == [3, 1, 1, 1]  # 1, 2, 3, and 2 again


@pytest.mark.gpu
def test_a_cuda_graph_answers_as_the_pass_does() -> None:
    device = torch.device("cuda")
    run = Graphs(sums, (Size(8, 2),), device, graphs.record_on_gpu)
    for lengths in ((3, 2), (5, 3), (8,)):
        assert torch.equal(run(rows_of(*lengths)).cpu(), sums(rows_of(*lengths)))


@pytest.mark.whole
def test_what_a_pass_reads_lives_as_long_as_its_recording() -> None:
    def recorded() -> tuple[Any, Any]:
        rows = rows_of(3)
        return weakref.ref(rows), graphs.CudaGraph(None, sums(rows), lambda: sums(rows))

    seen, recording = recorded()
    gc.collect()
    assert seen() is not None
    del recording
    gc.collect()
    assert seen() is None


@pytest.mark.gpu
def test_a_cuda_graph_answers_when_its_rows_are_out_of_sight() -> None:
    def recorded() -> Any:
        rows = rows_of(3, 2).to(torch.device("cuda"))
        return graphs.record_on_gpu(lambda: sums(rows))

    recording = recorded()
    others = [torch.full((1 << size,), 7, device="cuda") for size in range(4, 20) for _ in range(8)]  # take what was freed
    assert torch.equal(recording.replay().cpu(), sums(rows_of(3, 2)))
    del others
