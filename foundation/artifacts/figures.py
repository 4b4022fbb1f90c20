"""Figures that several documents hold: the primary metric with its interval, its loss, greedy tokens compared, percentiles of times."""

from __future__ import annotations

from typing import Annotated

from foundation.artifacts.document import Document, Number

Backend = Annotated[str, "BACKEND"]
MetricName = Annotated[str, "METRIC"]
Metrics = dict[MetricName, Number | None]


class Interval(Document):
    """A figure with its interval."""

    value: Number | None = None
    """The value; null if it was not measured."""
    low: Number | None = None
    """Lower end of its 95 % interval; null where there is none."""
    high: Number | None = None
    """Upper end of its 95 % interval."""


class Accuracy(Interval):
    """The primary metric of one variant in one backend, on the whole evaluation split."""

    groups: int | None = None
    """Groups of rows that the interval is drawn over: rows that share a text, an image or a document are one."""
    interval_reason: str | None = None
    """Reason for a missing interval; absent otherwise."""
    n: int | None = None
    """Number of evaluated rows (tokens for text-generation)."""
    in_train: int | None = None
    """Number of evaluation rows that are trained on; absent if there are none."""
    reason: str | None = None
    """Why it was not measured."""


class Drop(Document):
    """Loss of the primary metric in a backend, on the same rows."""

    difference: Number | None = None
    """Baseline in torch minus this backend, on the same rows; for perplexity the relative increase."""
    low: Number | None = None
    """Lower end of the paired 95 % interval."""
    high: Number | None = None
    """Upper end of the paired 95 % interval."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over: rows that share a text, an image or a document are one."""
    interval_reason: str | None = None
    """Reason for a missing interval; absent otherwise."""
    n: int | None = None
    """Number of compared rows (tokens for text-generation)."""
    right_to_wrong: int | None = None
    """Rows that are right in the baseline and wrong in this backend."""
    wrong_to_right: int | None = None
    """The reverse."""
    changed: int | None = None
    """Rows whose prediction changed."""


class Tokens(Document):
    """Greedy answers compared with reference answers (`foundation.measure.tokens`)."""

    prompts: int | None = None
    """Number of prompts."""
    tokens: int | None = None
    """Tokens of an answer, at most."""
    equal_share: Number | None = None
    """Share of the tokens before the first one that differs."""
    identical: int | None = None
    """Answers that are identical."""
    first_other: Number | None = None
    """Median place of the first token that differs; null where none does."""
    decisions: int | None = None
    """Tokens that were decided on the same text before them."""
    disagreements: int | None = None
    """Decisions that differ."""
    limit: int | None = None
    """Largest allowed number of them."""
    passed: bool | None = None
    """Whether the limit is met."""


class Quality(Document):
    """BLEU and chrF of the greedy answers of text-to-text (`export.generation.translations`)."""

    n: int | None = None
    """Answers that were compared with references."""
    bleu: Number = 0.0
    """BLEU."""
    chrf: Number = 0.0
    """chrF."""
    bleu_before: Number = 0.0
    """BLEU of the float baseline."""
    chrf_before: Number = 0.0
    """chrF of the float baseline."""
    bleu_change: tuple[Number, ...] | None = None
    """95 % interval of the change of BLEU; null where there are too few groups."""
    bleu_order: int | None = None
    """Longest word n-grams that are counted."""
    bleu_chance: Number | None = None
    """BLEU of answers that do not depend on their source."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over."""


class Percentiles(Document):
    """Percentiles of a time, milliseconds."""

    p50: Number | None = None
    """Median."""
    p90: Number | None = None
    """90th percentile."""
    p99: Number | None = None
    """99th percentile; null below 200 samples."""
