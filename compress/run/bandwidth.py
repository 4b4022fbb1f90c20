"""The rate at which this machine reads memory: what limits the time per token of a language model at small batches.

bandwidth = bytes / time        the fastest of some sums over an array that no cache holds
"""

from __future__ import annotations

import time

ARRAY_BYTES = 512 * 2**20
"""More than the largest last-level caches."""
REPEATS = 8


def read_bandwidth(threads: int) -> float:
    """Measures the bytes per second that `threads` threads read from memory."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.ones(ARRAY_BYTES // 4)
        best = float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            values.sum()
            best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return ARRAY_BYTES / best
