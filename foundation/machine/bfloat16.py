"""Whether a processor is faster in bfloat16 than in float32.

Instructions for bfloat16 do not make it faster. On two cores of a Sapphire Rapids whose virtual machine hides AMX, torch 2.13.0
(oneDNN 3.12.0) multiplies bfloat16 at 160 GFLOP/s and float32 at 270. With AMX, or on a Zen 5, bfloat16 is the faster one. So it is
measured.

    gain = time of a float32 product / time of a bfloat16 product          the fastest of some of each, taken in turns
"""

from __future__ import annotations

import time
from collections.abc import Callable

from foundation.machine.cached import cached_file, read_cached, write_cached
from foundation.machine.environment import processor, versions

SHAPE = (1024, 384, 1536)
"""Rows, inputs and outputs of a product: the feed-forward layer of a small encoder for 8 texts of 128 tokens."""
REPEATS = 12
PAYS = 1.2
"""Gain from which bfloat16 is used: autocast casts weights and activations, which takes up to a fifth of a step."""


def bfloat16_pays(measure: Callable[[], float] | None = None) -> bool:
    """Returns whether bfloat16 is faster than float32 on this processor, whose instructions have it.

    Measured once in a third of a second and kept in the user's cache folder, so that a training that goes on later computes in the same
    format. It is measured again for another processor or other versions of the libraries.

    Args:
        measure: Measures the gain; default: `gain`.
    """
    file = cached_file("bfloat16", processor() | versions())
    entry = read_cached(file)
    if isinstance(entry, dict) and isinstance(entry.get("gain"), float):
        return bool(entry["gain"] >= PAYS)
    measured = (measure or gain)()
    write_cached(file, {"gain": measured})  # a folder that cannot be written: measured every time
    return measured >= PAYS


def gain() -> float:
    """Measures how many times faster a product of torch is in bfloat16 than in float32.

    One thread, in seconds of its processor: what other programs take of the cores does not count.
    """
    import torch

    rows, inputs, outputs = SHAPE
    formats = torch.float32, torch.bfloat16
    factors = [(torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)) for dtype in formats]
    best, threads = [float("inf"), float("inf")], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for _ in range(REPEATS):  # the first one chooses kernels; it is never the fastest
                for which, (left, right) in enumerate(factors):
                    started = time.thread_time()
                    torch.nn.functional.linear(left, right)
                    best[which] = min(best[which], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return best[0] / best[1]
