"""The `goals` section of a recipe: limits that the result must meet."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from foundation.core.config import Config

SUSPICIOUS = 0.2
"""From here on a fraction looks like points or percent."""
ENOUGH = 10
"""Fewest evaluation predictions that `max_drop` should allow to be lost."""


class LatencyGoal(Config):
    """An upper bound on one latency percentile of the served model at one shape."""

    percentile: Literal[50, 90, 99] = 50
    """Percentile of the latency samples."""
    batch: Annotated[int, Field(ge=1, le=1024)] = 1
    """Batch size. One that is not in `target.batch_sizes` is measured too."""
    sequence: Annotated[int, Field(ge=2)] | None = None
    """Sequence length in tokens, at most data.max_length; one that is not in `target.sequence_lengths` is measured too. Needed for texts.
    For waveforms in samples, one of the measured lengths. Omit for rows of one size, such as images."""
    value: Annotated[float, Field(gt=0)]
    """Upper bound in milliseconds."""
    at: Literal["engine", "server"] = "engine"
    """Place of the judgement. engine: one pass of the engine, in turns with the others. server: one request of `batch` rows to the Triton
    server of this run, from a client on this machine. The report shows both."""


class VariantGoals(Config):
    """Limits for one variant in the first engine of the target, whether or not it is served: for a member of a family, say."""

    max_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    """Maximum drop of the judged metric, as a fraction, against the baseline in torch."""
    min_speedup: Annotated[float, Field(gt=0)] | None = None
    """Minimum speed-up at the worst target shape."""
    over: str | None = None
    """The variant that `min_speedup` refers to, in the same engine; null: the baseline in torch (fp32, eager)."""
    max_size_mb: Annotated[float, Field(gt=0)] | None = None
    """Maximum size of the files that the engine loads, in 10^6 bytes."""

    @model_validator(mode="after")
    def _has_a_reference_for_a_ratio(self) -> Self:
        if self.over is not None and self.min_speedup is None:
            raise ValueError(f"over: {self.over} given without min_speedup, which refers to it: give min_speedup, or leave it out")
        return self


class Goals(Config):
    """Limits that the compressed model must meet; a goal that is not set is not judged."""

    LATER: ClassVar[tuple[str, ...]] = ("max_disagreement", "variants")

    metric: str | None = None
    """The metric that `max_drop`, the headline and the choice of what is served are about: a metric of the task
    (`compress list tasks`), or for classes `recall:LABEL`, `precision:LABEL` or `f1:LABEL` of one of them. null: the primary metric.
    What quantization may lose on selection rows with labels is counted in it too; trainings choose by the primary metric in any case."""
    max_drop: Annotated[float, Field(ge=0, json_schema_extra={"maximum": 1})] | None = None
    """Maximum drop of the judged metric, as a fraction: baseline in torch minus the served model in its last backend (Triton, else its
    engine, else torch). For perplexity, the maximum relative increase: served / baseline - 1."""
    max_disagreement: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest share of answers that are other ones than the baseline's in torch, as a fraction: what the stage `cascade` certifies, with
    its confidence."""
    min_speedup: Annotated[float, Field(gt=0)] | None = None
    """Minimum speed-up of the served model at the worst target shape, against the baseline in torch (fp32, eager)."""
    max_latency_ms: tuple[LatencyGoal, ...] = ()
    """Upper bounds on latency percentiles of the served model."""
    max_size_mb: Annotated[float, Field(gt=0)] | None = None
    """Maximum deployed size, the files that the engine of the served model loads, in 10^6 bytes."""
    min_throughput: Annotated[float, Field(gt=0)] | None = None
    """Minimum throughput of the served model in rows per second, at its best target shape."""
    max_bleu_drop: Annotated[float, Field(ge=0, le=100)] | None = None
    """For text-to-text: maximum drop of BLEU, in points of 0..100: greedy answers of the baseline in torch minus the answers of the last
    variant in the engine that answers."""
    int8_faster: bool | None = None
    """Whether the fastest int8 engine of the last variant must be faster than the fastest float engine of the model it was made of, at the
    largest shape, whichever of them is served. null: the report says so as a finding, and no goal is missed. false: it says nothing."""
    variants: dict[str, VariantGoals] | None = None
    """Limits for single variants by the id of their stage, such as each member of a family."""

    @field_validator("max_drop")
    @classmethod
    def _is_a_fraction(cls, value: float | None) -> float | None:
        if value is not None and value > 1:
            raise ValueError(f"a fraction of 0 to 1 is allowed: give {value / 100:.4g} for {value:g} points or percent")
        return value

    def questions(self, predictions: int | None = None) -> list[str]:
        """Returns one line for each goal that is allowed but probably not what was meant.

        Args:
            predictions: Number of judged predictions, where the judged metric is a share of them, for the recall of a class of its rows;
                None for other metrics.
        """
        if self.max_drop is None:
            return []
        if predictions and 0 < self.max_drop < 1 / predictions:
            kind, _, label = (self.metric or "").partition(":")
            of_class = f" of the class {label}" if kind == "recall" and label else ""
            one = f"one of {predictions} evaluation predictions{of_class} is {100 / predictions:.2g} points"
            enough = f"give at least {math.ceil(ENOUGH / self.max_drop)} rows{of_class}"
            return [f"goals.max_drop: {self.max_drop:g} given, but {one}: a single lost answer misses the goal; {enough}"]
        if self.max_drop < SUSPICIOUS:
            return []
        points, meant = f"{100 * self.max_drop:.4g} points (percent for perplexity)", f"{self.max_drop / 100:.4g}"
        much = "every model meets it" if self.max_drop == 1 else "this lets the model get far worse"
        return [f"goals.max_drop: {self.max_drop:g} is a fraction, a drop of {points}: {much}; give {meant} for {self.max_drop:g} points"]
