"""Random numbers for rows that processes share, such as dropout: the same as in one process, whichever process has a row.

A process that has m of the B rows of a batch draws what one process would draw for all of them, B values where its own tensors have m, and
takes the numbers of its rows. Then all processes draw the same from one seed, and the losses equal one process's up to the order of
additions. Drawing is not part of the work that several processes share.

    in place    aten::bernoulli_ (every dropout on a CPU, in attention too), uniform_, normal_, exponential_
    new         aten::rand, randn (paths that are dropped, noise)

A tensor has rows where its first axis is a multiple of m: rows, their windows, or their tokens, if it has two axes. Others, such as a table
of relative positions, are drawn as they are: the same in all processes. Rows have to be padded alike in all of them. Numbers from a
generator that is given are left alone.

Left out: draws on a GPU, whose kernels for attention draw inside; what models draw with numpy (SpecAugment); texts and images of two
towers, which have other numbers of rows. There each process draws its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.machine.parallel import Team
from foundation.training.rows import Rows

_aten = torch.ops.aten
IN_PLACE: Final = (_aten.bernoulli_.float, _aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default)
NEW: Final = (_aten.rand.default, _aten.randn.default)


class RowDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, tensors with rows get the numbers that one process would draw for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own, self.total = torch.zeros(1, dtype=torch.int64), 1
        self.every = np.zeros(0, np.int64)
        """The rows that all processes take at the same time."""
        self.widths: set[int] = set()
        """Tokens of a row."""

    def of(self, rows: NDArray[np.int64], every: NDArray[np.int64]) -> RowDraws:
        """Sets which rows are run, and returns the context to run them in.

        Args:
            rows: The rows of this process, int64 `[m]`.
            every: The rows that all processes take at the same time, int64 `[B]`; none of its own where it runs one for its collectives.
        """
        places = np.flatnonzero(np.isin(every, rows))
        self.own = torch.from_numpy(places if len(places) == len(rows) else np.zeros(len(rows), np.int64))
        self.total, self.every = len(every), every
        return self

    def read(self, rows: Rows, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns the features of the rows of this process, padded to the longest row that any process takes."""
        features = rows.batch(indices, self.every)
        self.widths = {value.shape[1] for value in features.values() if value.ndim == 2}
        return features

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs an operation; numbers are drawn for all rows."""
        given = dict(kwargs or {})
        if given.get("generator") is None and len(self.own) < self.total:
            if func in IN_PLACE and self._has_rows(args[0].shape) and args[0].device.type == "cpu":
                whole = func(_like(args[0], self._of_all(args[0].shape)), *args[1:], **given)
                return args[0].copy_(self._own(whole))
            device = given.get("device")
            if func in NEW and self._has_rows(args[0]) and torch.device("cpu" if device is None else device).type == "cpu":
                return self._own(func(self._of_all(args[0]), *args[1:], **given))
        return func(*args, **given)

    def _has_rows(self, shape: Sequence[int]) -> bool:
        if not len(shape) or not shape[0] or shape[0] % len(self.own):
            return False
        each = shape[0] // len(self.own)
        return each == 1 or len(shape) > 2 or each in self.widths

    def _of_all(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of a tensor that has the rows of all processes."""
        return [shape[0] // len(self.own) * self.total, *shape[1:]]

    def _own(self, whole: Tensor) -> Tensor:
        """Returns the part of a tensor that belongs to own rows."""
        own: Tensor = whole.view(self.total, -1, *whole.shape[1:])[self.own].flatten(0, 1)
        return own


def row_draws(team: Team, device: torch.device, rows: Rows, runs_twice: bool) -> RowDraws | None:
    """Returns the shared generator of the processes of a training; None where each draws its own.

    Args:
        team: The processes.
        device: Where they compute.
        rows: The training rows.
        runs_twice: Whether micro-batches are run twice (`foundation.training.grad_cache`), in an order of their own.
    """
    shared = team.data_size > 1 and team.model_parallel_size == 1 and device.type == "cpu" and not rows.towers and not runs_twice
    return RowDraws() if shared else None


def _like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns an empty tensor with the memory order of another one's axes: some kernels draw in this order."""
    order = sorted(range(tensor.ndim), key=lambda axis: -tensor.stride()[axis])
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)
