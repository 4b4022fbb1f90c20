"""The speed of this machine, measured once in about a second and kept in the user's cache folder.

    macs_per_s     multiply-accumulates per second of float32 matrix products in torch, with the threads of the target
    trained_per_s  the same in the precision that models are trained in here: bfloat16 if the processor multiplies it
    python_s       seconds of a fixed loop in Python: tracing, graph surgery and starting processes go with it
    written_per_s  bytes per second that are written to the cache folder's disk

Each is the best of a few repeats, since other programs only ever make it slower. It is measured again when processor, threads or library
versions change, and whenever torch is loaded as long as other programs ran meanwhile: the best of all is kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.machine.cached import cached_file, read_cached, write_cached
from foundation.machine.environment import cache_folder, hardware, processor, versions

if TYPE_CHECKING:
    import torch

REPEATS = 5
PRODUCTS = 30
"""Repeats of a product of 1 to 5 ms: of five the fastest is off by a third, of thirty by a thirtieth."""
SIZE = 512
"""Rows and columns of the matrices: a row's products in a small encoder are of this size."""
LOOP = 200_000
QUIET = 0.5
"""Running threads per core below which a measurement is final."""
BLOCK = 2**24
"""Bytes of a file."""


@dataclass(frozen=True)
class Speed:
    """The measured speed."""

    macs_per_s: float
    trained_per_s: float
    python_s: float
    written_per_s: float


def running() -> float:
    """Returns how many threads have been running at one time in the last minute, for each core."""
    return os.getloadavg()[0] / max(1, int(hardware()["cores"]))


def speed(threads: int, measure: Callable[[int], Speed] | None = None, load: Callable[[], float] = running) -> Speed:
    """Returns the speed of this machine, from the cache folder or measured now.

    Args:
        threads: Threads of the matrix products.
        measure: Measures it; default: `measured`.
        load: How many threads are running for each core.
    """
    file = cached_file("speed", processor() | {"threads": threads, "versions": versions()})
    kept, quiet = _cached(file)
    if kept is not None and (quiet or "torch.nn" not in sys.modules):  # which takes longer to load than this to measure
        return kept
    quiet, found = load() < QUIET, (measure or measured)(threads)
    if kept is not None:
        found = Speed(
            macs_per_s=max(kept.macs_per_s, found.macs_per_s),
            trained_per_s=max(kept.trained_per_s, found.trained_per_s),
            python_s=min(kept.python_s, found.python_s),
            written_per_s=max(kept.written_per_s, found.written_per_s),
        )
    write_cached(file, asdict(found) | {"quiet": quiet})  # a folder that cannot be written: measured every time
    return found


def _cached(file: Path) -> tuple[Speed | None, bool]:
    """Returns the speed in a file, and whether the machine was quiet; (None, False) for one that is absent or damaged."""
    entry = read_cached(file)
    try:
        known = Speed(**{name: float(entry[name]) for name in Speed.__dataclass_fields__})
        return (known, bool(entry["quiet"])) if all(value > 0 for value in asdict(known).values()) else (None, False)
    except (ValueError, KeyError, TypeError):
        return None, False


def measured(threads: int) -> Speed:
    """Measures this machine; takes about a second."""
    import torch

    from foundation.training.precision import autocast_dtype

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        single, trained = (_product_s(dtype) for dtype in (torch.float32, autocast_dtype(torch.device("cpu"))))
    finally:
        torch.set_num_threads(before)
    return Speed(SIZE**3 / single, SIZE**3 / trained, _best(_loop), BLOCK / _best(_write))


def _product_s(dtype: torch.dtype) -> float:
    """Returns the seconds of a matrix product, without those of allocating its result."""
    import torch

    left, right, out = (torch.ones(SIZE, SIZE, dtype=dtype) for _ in range(3))
    return _best(lambda: torch.mm(left, right, out=out), PRODUCTS)


def _loop() -> None:
    found: dict[int, int] = {}
    for number in range(LOOP):
        found[number & 1023] = found.get(number & 511, 0) + number


def _write() -> None:
    folder = cache_folder() if cache_folder().is_dir() and os.access(cache_folder(), os.W_OK) else Path(tempfile.gettempdir())
    with tempfile.TemporaryFile(dir=folder) as stream:
        stream.write(bytes(BLOCK))
        stream.flush()


def _best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Returns the seconds of the fastest of a few repeats; the first one loads what it needs and is never the fastest."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return max(1e-9, min(found))
