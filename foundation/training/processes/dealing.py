"""How a training deals out its rows: an epoch as batches, a batch to the processes, and what a process takes as micro-batches.

    batch        batch_size rows, or as many runs as fit (`foundation.core.runs`): texts of a pair, candidates of a query
    process      every P-th row of a batch, or every P-th run
    micro-batch  micro_batch_size of these rows, or as many runs as fit

A run is never cut, so that a loss that compares the rows of a run is the same however a batch is divided. Losses that compare rows of
different runs gather them from all processes (`foundation.training.processes.gathered`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foundation.core.runs import rows_of, sizes_of
from foundation.machine.parallel import Team
from foundation.training.rows import plan_epoch, plan_runs

Rows = NDArray[np.int64]


class Dealing:
    """Deals out the rows of one training.

    Args:
        sizes: Rows of each run, int64 `[r]`; ones where rows are learned one by one.
        batch_size: Rows per step, at least the rows of the longest run.
        micro_batch_size: Rows in memory at once in each process; None: all rows of a batch that the process takes.
        team: The training processes.
    """

    def __init__(self, sizes: Rows, batch_size: int, micro_batch_size: int | None, team: Team) -> None:
        longest = int(sizes.max(initial=1))
        self.sizes, self.team, self.runs_each = sizes, team, batch_size // longest
        self.batch_size = longest * self.runs_each
        self.runs_at_once = None if micro_batch_size is None else micro_batch_size // longest
        self.micro_batch_size = None if self.runs_at_once is None else longest * self.runs_at_once
        self.epoch_steps = -(-len(sizes) // self.runs_each)
        self.run_of = np.zeros(0, np.int64) if longest == 1 else np.repeat(np.arange(len(sizes)), sizes)

    def batches(self, lengths: Rows, seed: int, epoch: int) -> list[Rows]:
        """Returns the batches of an epoch, rows int64 `[b]` each, given the tokens of every row `[n]`."""
        if not len(self.run_of):
            return plan_epoch(lengths, self.batch_size, seed, epoch)
        return plan_runs(lengths, self.batch_size, seed, epoch, self.sizes)

    def first(self, indices: Rows) -> Rows:
        """Returns the first micro-batch, rows int64 `[m]`: a process without rows runs it only for the collectives."""
        return indices[: sizes_of(self.run_of[indices])[0] if len(self.run_of) else 1]

    def at_once(self, indices: Rows) -> list[Rows]:
        """Returns the rows of a batch that all processes take as one micro-batch, in the order of the batch, int64 `[k]` each."""
        sizes = sizes_of(self.run_of[indices]) if len(self.run_of) else None
        count = len(indices) if sizes is None else len(sizes)
        most = (self.runs_at_once or count) * self.team.data_size
        runs = [np.arange(start, min(count, start + most)) for start in range(0, count, most)]
        return [indices[part if sizes is None else rows_of(sizes, part)] for part in runs]

    def parts(self, indices: Rows) -> list[Rows]:
        """Returns the micro-batches that this process takes of a batch, rows int64 `[m]` each.

        All processes get equally many micro-batches; the last ones may be empty.

        Args:
            indices: Rows of the batch `[b]`, the rows of a run one after the other.
        """
        sizes = sizes_of(self.run_of[indices]) if len(self.run_of) else None
        count = len(indices) if sizes is None else len(sizes)
        most = -(-count // self.team.data_size)  # of a process
        size, own = self.runs_at_once or most, self.team.share(np.arange(count))
        parts = [own[start : start + size] for start in range(0, most, size)]
        return [indices[part if sizes is None else rows_of(sizes, part)] for part in parts]
