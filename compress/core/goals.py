"""The `goals` section of a recipe: limits that the result must meet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.core.config import Config


class LatencyGoal(Config):
    """An upper bound on one latency percentile of the served model at one shape."""

    percentile: Literal[50, 90, 99] = 50
    """Percentile of the latency samples."""
    batch: Annotated[int, Field(ge=1)] = 1
    """Batch size, one of `target.batch_sizes`."""
    sequence: Annotated[int, Field(ge=1)] | None = None
    """Sequence length in tokens, one of the measured lengths. Omit for images."""
    value: Annotated[float, Field(gt=0)]
    """Upper bound in milliseconds."""


class Goals(Config):
    """Limits that the compressed model must meet; a goal that is not set is not judged."""

    max_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    """Maximum drop of the primary metric, as a fraction: baseline in torch minus the served model in its last backend (Triton, else its
    engine, else torch). For perplexity, the maximum relative increase: served / baseline - 1."""
    min_speedup: Annotated[float, Field(gt=0)] | None = None
    """Minimum speed-up of the served model at the worst target shape, against the baseline in torch (fp32, eager)."""
    max_latency_ms: tuple[LatencyGoal, ...] = ()
    """Upper bounds on latency percentiles of the served model."""
    max_size_mb: Annotated[float, Field(gt=0)] | None = None
    """Maximum deployed size, the files that the engine of the served model loads, in 10^6 bytes."""
    min_throughput: Annotated[float, Field(gt=0)] | None = None
    """Minimum throughput of the served model in rows per second, at its best target shape."""
    max_bleu_drop: Annotated[float, Field(ge=0, le=100)] | None = None
    """For text-to-text: maximum drop of BLEU, in points of 0..100: greedy answers of the baseline in torch minus those of the last variant
    in the engine that answers."""
    int8_faster: bool = True
    """Whether the fastest int8 engine of the last variant must be faster than the fastest float engine of the model it was made of, at the
    largest shape, whichever of them is served."""
