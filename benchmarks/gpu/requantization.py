"""Proves step 3 of `export.kernels.rounding`: near a tie, codes by a reciprocal and one correction are those of the division.

    python -m benchmarks.gpu.requantization            every significand of a scale; minutes on one core
    python -m benchmarks.gpu.requantization --every 997    a sample

For scales s from 1 to 2, each of the 2^23 float32 numbers, for the 128 ties (k + 1/2) s with k from 0 to 127, and for the 7 float32
numbers around each: the code of x / s, the code of x (1 / s), and the code after one correction. Powers of two and signs change none of
the three, so that these are all cases. The products are those of the processor, rounded once; the fused ones come from the interpreter of
the Triton language, which calls `fmaf`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from triton.runtime.interpreter import _interpreter

SIGNIFICANDS, TIES, NEIGHBOURS = 2**23, 128, 3
SPACING_ONE = np.float32(1.5 * 2**23)
CHUNK = 2**14
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True)
class Found:
    """What was counted."""

    quotients: int
    reciprocal_alone: int
    """Codes of x (1 / s) that differ from the codes of x / s."""
    corrected: int
    """The same after one correction."""


def fused(x: Floats, y: Floats, z: Floats) -> Floats:
    """Returns x y + z, rounded once."""
    return np.asarray(_interpreter.fma_fp32(*(np.ascontiguousarray(one) for one in np.broadcast_arrays(x, y, z))), np.float32)


def near_ties(scale_S: Floats, tie: int) -> Floats:
    """Returns the float32 numbers around (tie + 1/2) s, `[2 NEIGHBOURS + 1, S]`."""
    middle = ((tie + 0.5) * scale_S.astype(np.float64)).astype(np.float32).view(np.int32)
    steps: Floats = (middle + np.arange(-NEIGHBOURS, NEIGHBOURS + 1, dtype=np.int32)[:, None]).view(np.float32)
    return steps


def counted(significands: Iterable[range]) -> Found:
    """Compares the codes for scales 1 + m 2^-23, where m goes over ranges."""
    quotients = alone = corrected = 0
    for some in significands:
        scale_S = (np.float32(1).view(np.int32) + np.arange(some.start, some.stop, some.step, dtype=np.int32)).view(np.float32)
        reciprocal_S = np.float32(1) / scale_S
        for tie in range(TIES):
            x = near_ties(scale_S, tie)
            first = x * reciprocal_S
            better = fused(fused(-first, scale_S, x), reciprocal_S, first)
            divided = x / scale_S + SPACING_ONE
            quotients += x.size
            alone += int(np.count_nonzero(first + SPACING_ONE != divided))
            corrected += int(np.count_nonzero(better + SPACING_ONE != divided))
    return Found(quotients, alone, corrected)


def chunks(every: int) -> Iterable[range]:
    """Yields the significands that are taken, in pieces that fit the cache."""
    for start in range(0, SIGNIFICANDS, CHUNK * every):
        yield range(start, min(SIGNIFICANDS, start + CHUNK * every), every)


def main() -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.requantization", description="Codes by a reciprocal against division.")
    parser.add_argument("--every", type=int, default=1, help="take one significand of so many (default: all)")
    found = counted(chunks(parser.parse_args().every))
    print(f"{found.quotients} quotients; codes that differ: {found.reciprocal_alone} by the reciprocal alone, {found.corrected} corrected")


if __name__ == "__main__":
    main()
