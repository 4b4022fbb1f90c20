"""Which rows and which part of each layer a process has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.core.target import Parallel
from foundation.machine.faults import Fault
from foundation.machine.lifeline import End
from foundation.machine.parallel import ALONE, LINE_BYTES, WATCHED, Strategy, Team, _is_reported_elsewhere, own_lines
from tests.problems import raises_problem


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_neighbours_share_layers_and_groups_of_them_the_rows(groups: int, tensor: int, num_rows: int) -> None:
    rows = np.arange(num_rows)
    taken: dict[int, list[list[int]]] = {}
    for rank in range(groups * tensor):
        team = Team(rank, groups * tensor, "ddp", tensor)
        assert (team.data_size, team.data_rank) == (groups, rank // tensor)
        assert team.tensor_rank == rank - tensor * team.data_rank
        taken.setdefault(team.data_rank, []).append(team.share(rows).tolist())
    assert all(len(shares) == tensor and all(share == shares[0] for share in shares) for shares in taken.values())
    assert sorted(row for shares in taken.values() for row in shares[0]) == rows.tolist()


@pytest.mark.parametrize(
    ("strategy", "tensor", "shards"), [("ddp", 1, False), ("fsdp2", 1, True), ("ddp", 2, True), ("fsdp2", 2, True), ("fsdp2", 4, True)]
)
def test_a_process_holds_a_part_with_fsdp2_or_shared_layers(strategy: Strategy, tensor: int, shards: bool) -> None:
    team = Parallel(strategy=strategy, tensor=tensor).of(Team(1, 4))
    assert team == Team(1, 4, strategy, tensor)
    assert team.shards is shards
    assert Parallel(strategy=strategy, tensor=tensor).of(ALONE) is ALONE
    assert not ALONE.shards


def test_those_that_share_layers_divide_the_processes() -> None:
    with raises_problem("parallel.tensor", "4", "6 processes", "give 1 or 2 or 3 or 6"):
        Parallel(tensor=4).of(Team(0, 6))


class Store:
    """The store of a run: counts failures; gone with process 0 if told so."""

    def __init__(self, failed: int, *, gone: bool = False) -> None:
        self.failed, self.gone, self.asked = failed, gone, False

    def add(self, key: str, number: int) -> int:
        self.asked = True
        if self.gone:
            raise RuntimeError("recvValue failed")
        self.failed += number
        return self.failed


LOST = RuntimeError("Connection closed by peer [127.0.0.1]:1234")


class Line:
    """The lines to other processes: knows why this one ends, or finds that out while it is asked."""

    def __init__(self, end: End | None = None, *, later: bool = False) -> None:
        self.end, self.later = end, later

    def why(self, seconds: float = 1.0) -> End | None:
        return self.end if seconds or not self.later else None


FOLLOWS = RuntimeError("NCCL error: remote process exited")
"""How another back end says that a process is gone."""


@pytest.mark.parametrize(
    ("error", "watched", "store", "told", "asks"),
    [
        (ValueError("bad"), True, Store(0), False, True),
        (ValueError("bad"), False, Store(1), True, True),
        (LOST, True, Store(0, gone=True), True, False),  # torch would write a trace about the store
        (LOST, False, Store(0), False, True),
        (LOST, False, Store(1), True, True),
        (LOST, False, Store(0, gone=True), False, True),
    ],
)
def test_one_process_says_why_all_end(
    error: Exception, watched: bool, store: Store, told: bool, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WATCHED, "1") if watched else monkeypatch.delenv(WATCHED, raising=False)
    assert _is_reported_elsewhere(error, store, Line()) == told  # type: ignore[arg-type]
    assert store.asked == asks


@pytest.mark.parametrize(
    ("error", "line", "told"),
    [
        (LOST, Line(End(None)), True),
        (LOST, Line(End("process 1 on b is gone"), later=True), "process 1 on b is gone"),
        (FOLLOWS, Line(End("process 1 on b is gone")), "process 1 on b is gone"),
        (FOLLOWS, Line(End(None)), True),
        (FOLLOWS, Line(End("process 1 on b is gone"), later=True), False),  # an error of its own: it does not wait for another reason
        (ValueError("bad"), Line(End("process 1 on b is gone")), False),
        (KeyboardInterrupt(), Line(End(None)), False),
    ],
)
def test_what_the_line_knows_comes_first(error: BaseException, line: Line, told: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WATCHED, raising=False)
    if isinstance(told, str):
        with pytest.raises(Fault, match=told):
            _is_reported_elsewhere(error, Store(0), line)  # type: ignore[arg-type]
    else:
        assert _is_reported_elsewhere(error, Store(0), line) == told  # type: ignore[arg-type]


@pytest.mark.parametrize(("line", "told"), [(Line(End(None)), True), (Line(End("process 0 on b is gone")), False), (Line(), False)])
def test_what_all_processes_find_wrong_is_said_by_the_first(line: Line, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 has failed by the same mistake and is gone with the store, or it was ended before."""
    monkeypatch.delenv(WATCHED, raising=False)
    line.later = True
    assert _is_reported_elsewhere(ValueError("bad"), Store(0, gone=True), line) == told  # type: ignore[arg-type]


@given(offset=st.integers(1, 15), rows=st.integers(1, 9), columns=st.integers(1, 9))
def test_tensors_get_memory_that_begins_with_a_line(offset: int, rows: int, columns: int) -> None:
    def off_line(*shape: int) -> Tensor:
        return torch.randn(math.prod(shape) + offset)[offset:].view(shape)

    layer, other = nn.Linear(columns, rows), nn.Linear(columns, rows)
    layer.weight.data, aligned = off_line(rows, columns), layer.bias.data_ptr()
    other.weight.data = layer.weight.data  # tied, but another object
    layer.register_buffer("moved", off_line(rows).as_strided((rows, 1), (1, rows)), persistent=False)
    module = nn.ModuleList([layer, other])
    before = {name: value.clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}
    assert layer.weight.data_ptr() % LINE_BYTES
    own_lines(module)
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert all(value.data_ptr() % LINE_BYTES == 0 and torch.equal(value, before[name]) for name, value in after.items())
    assert layer.weight.data_ptr() == other.weight.data_ptr()
    assert layer.bias.data_ptr() == aligned  # what was right stays where it is
