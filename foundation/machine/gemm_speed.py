"""The speed of a large matrix product on a device: what a training can reach at best there, whatever its data sheet says.

speed = 2 n^3 / time        the fastest of some products of two n x n matrices
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZES = {"cpu": 1024, "cuda": 8192}
"""n by type of device: large enough that the product is not limited by memory."""
REPEATS = 5


def gemm_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Measures the floating-point operations per second of a matrix product.

    Args:
        device: Where it runs, with the threads that torch has.
        dtype: Type of its factors.
    """
    import torch

    size = SIZES.get(device.type, SIZES["cpu"])
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first one chooses kernels; it is never the fastest
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
