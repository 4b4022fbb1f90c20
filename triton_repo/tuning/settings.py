"""The key `tune` of the stage `triton_repo`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.core.config import Config

Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1, max_length=16)]
Delays = Annotated[tuple[Annotated[int, Field(ge=0, le=1_000_000)], ...], Field(min_length=1, max_length=16)]


class Tune(Config):
    """Searches the settings of the served model that answer the most rows per second within a limit of the p99, by measured load."""

    p99_ms: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most milliseconds of the p99 latency. null: the p99 of the recipe's settings where they are saturated."""
    concurrency: Counts = (1, 4, 16, 64)
    """Requests under way at which each setting is measured, ascending; the best of them within the limit counts."""
    rows: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rows of a request."""
    seconds: Annotated[float, Field(ge=0.1, le=600)] = 2.0
    """Seconds of a measurement in the first round. Each round keeps a third of the settings and measures them three times as long."""
    repeats: Annotated[int, Field(ge=5, le=100)] = 6
    """Times that the best settings and the recipe's are measured anew, in turns, each three times as long as in the first round.
    The best ones are taken if they are faster by the whole 95 % interval of the ratio; more repeats show smaller gains."""
    instances: Counts | None = None
    """Processes to try. null: powers of two from 1 to the threads of the target."""
    max_batch_size: Counts | None = None
    """Largest batches to try. null: 1, the recipe's, and four times the recipe's."""
    max_queue_delay_us: Delays = (0, 1000, 5000)
    """Microseconds to try that a request waits for others."""
