"""The search space: processes, threads of each, largest batch, and how long a request waits for others.

    instances x threads is the number of threads of the target, rounded down: processes that share cores with each other wait for them
    a batch of 1 merges nothing, so nothing waits for it: its delay is always 0

The engine, its mode and its files stay those that were evaluated, so every point gives the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from triton_repo.tuning.settings import Tune


@dataclass(frozen=True)
class Point:
    """Settings of a served model."""

    instances: int
    """Processes of the model."""
    threads: int
    """CPU threads of each."""
    max_batch_size: int
    """Most rows of a batch."""
    max_queue_delay_us: int
    """Microseconds that a request waits for others."""


def points(tune: Tune, own: Point, cores: int) -> list[Point]:
    """Returns the points to try, without repetition: `own` first, then in a fixed order.

    Args:
        tune: Settings of the search in the recipe.
        own: The settings of the recipe itself.
        cores: Threads of the target.
    """
    instances = tune.instances or tuple(_powers_of_two(cores))
    batches = tune.max_batch_size or (1, own.max_batch_size, min(1024, 4 * own.max_batch_size))
    found = [own]
    for count, batch, delay in product(instances, batches, tune.max_queue_delay_us):
        found.append(Point(count, max(1, cores // count), max(batch, tune.rows), delay if batch > 1 else 0))
    return list(dict.fromkeys(found))


def _powers_of_two(most: int) -> Iterator[int]:
    """Yields 1, 2, 4, ... below `most`, then `most`."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most
