"""The lengths to pad rows to: the buckets with the least total cost for the lengths of the data, by dynamic programming.

    rows of lengths up to l_1 < ... < l_m          N_j of them are not longer than l_j;  c_j: measured seconds for a row padded to l_j

    T_1(j) = N_j c_j                               one bucket for all of them
    T_k(j) = min over i < j of  T_{k-1}(i) + (N_j - N_i) c_j

T_k(m) is the least cost with k buckets, of which the last is l_m = max_length. The number is the smallest one whose cost is within `CLOSE`
of the least with at most `most` buckets: every bucket costs memory, and time at the start of a server.

Costs are measured at a few lengths (`measured_at`). No row costs more than a longer one, so the cost of a length is at most what was
measured at any longer one. One slow sample on a busy machine therefore raises no other length, and is itself corrected. Between the
lengths the cost is interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STEP = 8
"""Buckets are multiples of this, besides max_length: kernels work in blocks of about that size."""
CLOSE = 0.01
MOST_CANDIDATES = 256
MEASURED = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Chosen:
    """Buckets with what they cost."""

    buckets: tuple[int, ...]
    """Lengths, ascending; the last is max_length."""
    cost: float
    """Mean cost of a row, in the unit of the measured costs."""
    costs: tuple[float, ...]
    """The least mean cost with 1, 2, ... buckets."""


def candidates(max_length: int) -> list[int]:
    """Returns the lengths that may become buckets: multiples of `STEP`, of a multiple of it for long models, and max_length."""
    step = STEP * -(-max_length // (STEP * MOST_CANDIDATES))
    return [*range(step, max_length, step), max_length]


def measured_at(max_length: int) -> list[int]:
    """Returns the lengths to measure the cost at."""
    return [*(length for length in MEASURED if length < max_length), max_length]


def costs_at(lengths: Sequence[int], measured: Mapping[int, float]) -> NDArray[np.float64]:
    """Returns the cost at each length, interpolated between the running minimum, from the longest length to the shortest.

    Noise only adds to a time: where a longer length took less, the sample of the shorter one is the wrong one.

    Args:
        lengths: Ascending.
        measured: Cost by length.
    """
    points = sorted(measured)
    falling = [measured[point] for point in reversed(points)]
    return np.interp(lengths, points, np.minimum.accumulate(falling)[::-1])


def choose(rows: Sequence[int], measured: Mapping[int, float], max_length: int, most: int) -> Chosen:
    """Returns the buckets for rows of these lengths.

    Args:
        rows: Length of each row (tokens), at least one; longer ones than max_length are truncated.
        measured: Measured cost of a row by length.
        max_length: Longest length.
        most: Largest number of buckets, at least 1.
    """
    lengths = candidates(max_length)
    price = costs_at(lengths, measured)
    below = np.searchsorted(np.sort(np.minimum(rows, max_length)), lengths, side="right")
    totals, before = [below * price], []
    for _ in range(1, min(most, len(lengths))):
        # [i, j]: the bucket before j is i; only i < j is allowed
        table = totals[-1][:, None] + (below[None, :] - below[:, None]) * price[None, :]
        table[np.tril_indices(len(lengths))] = np.inf
        before.append(table.argmin(axis=0))
        totals.append(table.min(axis=0))
    least = np.array([total[-1] for total in totals])
    count = int(np.flatnonzero(least <= least.min() * (1 + CLOSE))[0]) + 1
    place, chosen = len(lengths) - 1, [max_length]
    for step in reversed(before[: count - 1]):
        place = int(step[place])
        chosen.append(lengths[place])
    mean = tuple(float(value) / len(rows) for value in least)
    return Chosen(tuple(reversed(chosen)), mean[count - 1], mean)


def most_buckets(memory_bytes: int, size_bytes: int, batch_sizes: Sequence[int]) -> int:
    """Returns how many buckets fit into memory, at least 1: each is compiled for each batch size, and each network holds the weights.

    Args:
        memory_bytes: Memory that all compiled networks may take.
        size_bytes: Size of the weights.
        batch_sizes: Batch sizes that are compiled.
    """
    return max(1, memory_bytes // max(1, size_bytes * len(batch_sizes)))
