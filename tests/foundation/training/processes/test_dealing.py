"""How rows are dealt out: every row once, runs never cut, the same number of micro-batches in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foundation.machine.parallel import ALONE, Team
from foundation.training.processes.dealing import Dealing
from foundation.training.rows import plan_epoch

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=20)


@dataclass
class Fellow:
    """One of several processes, as far as `Dealing` asks."""

    data_rank: int
    data_size: int

    share = Team.share


def dealt(sizes: list[int], batch_size: int, micro: int | None, rank: int = 0, processes: int = 1) -> Dealing:
    return Dealing(np.array(sizes), batch_size, micro, cast("Team", Fellow(rank, processes)))


@given(SIZES, st.integers(0, 9), st.integers(1, 3), st.sampled_from([None, 0, 3]), st.integers(0, 99))
def test_every_row_is_learned_once_an_epoch_and_runs_stay_whole(
    sizes: list[int], more: int, processes: int, more_at_once: int | None, seed: int
) -> None:
    longest, ends = max(sizes), np.cumsum(sizes)
    runs = {tuple(range(end - size, end)) for size, end in zip(sizes, ends.tolist(), strict=True)}
    micro = None if more_at_once is None else longest + more_at_once
    fellows = [dealt(sizes, longest + more, micro, rank, processes) for rank in range(processes)]
    lengths = np.random.default_rng(seed).integers(1, 50, sum(sizes))
    batches = fellows[0].batches(lengths, seed, 0)
    assert len(batches) == fellows[0].epoch_steps
    assert sorted(np.concatenate(batches).tolist()) == list(range(sum(sizes)))
    for batch in batches:
        assert len(batch) <= longest + more
        parts = [fellow.parts(batch) for fellow in fellows]
        assert len({len(own) for own in parts}) == 1
        assert sorted(row for own in parts for part in own for row in part.tolist()) == sorted(batch.tolist())
        for part in (part.tolist() for own in parts for part in own):
            assert micro is None or len(part) <= micro
            while part:
                run = next(run for run in runs if run[0] == part[0])
                assert tuple(part[: len(run)]) == run
                part = part[len(run) :]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4) | st.none(), st.integers(1, 3))
def test_rows_that_are_learned_one_by_one_are_dealt_round_robin(rows: int, batch_size: int, micro: int | None, processes: int) -> None:
    lengths = np.random.default_rng(rows).integers(1, 50, rows)
    fellows = [dealt([1] * rows, batch_size, micro, rank, processes) for rank in range(processes)]
    batches = fellows[0].batches(lengths, 3, 1)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in plan_epoch(lengths, batch_size, 3, 1)]
    for batch in batches:
        most = -(-len(batch) // processes)
        for rank, fellow in enumerate(fellows):
            own = batch[rank::processes].tolist()
            size = micro or most
            assert [part.tolist() for part in fellow.parts(batch)] == [own[at : at + size] for at in range(0, most, size)]


def test_a_batch_has_as_many_runs_as_fit() -> None:
    one = Dealing(np.array([3, 2, 3, 1]), 8, 4, ALONE)
    assert (one.batch_size, one.micro_batch_size, one.epoch_steps) == (6, 3, 2)
