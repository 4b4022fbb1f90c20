"""A figure in report.json: the primary metric with its interval, and what it lost."""

from __future__ import annotations

from typing import Annotated

from foundation.artifacts.document import Document, Number

Backend = Annotated[str, "BACKEND"]
MetricName = Annotated[str, "METRIC"]
Metrics = dict[MetricName, Number | None]


class Accuracy(Document):
    """The primary metric of one variant in one backend, on the whole evaluation split."""

    value: Number | None = None
    """The metric; null if it was not measured."""
    low: Number | None = None
    """Lower end of its 95 % interval."""
    high: Number | None = None
    """Upper end of its 95 % interval."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over: rows that share a text, an image or a document are one."""
    interval_reason: str | None = None
    """Only where there is no interval: why."""
    n: int | None = None
    """Number of evaluated rows (tokens for text-generation)."""
    in_train: int | None = None
    """Only where there are any: how many of the evaluation rows are trained on."""
    reason: str | None = None
    """Why it was not measured."""


class Drop(Document):
    """What a backend lost of the primary metric, on the same rows."""

    difference: Number | None = None
    """Baseline in torch minus this backend, on the same rows; for perplexity the relative increase."""
    low: Number | None = None
    """Lower end of the paired 95 % interval."""
    high: Number | None = None
    """Upper end of the paired 95 % interval."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over: rows that share a text, an image or a document are one."""
    interval_reason: str | None = None
    """Only where there is no interval: why."""
    n: int | None = None
    """Number of compared rows (tokens for text-generation)."""
    right_to_wrong: int | None = None
    """Rows that are right in the baseline and wrong in this backend."""
    wrong_to_right: int | None = None
    """The reverse."""
    changed: int | None = None
    """Rows whose prediction changed."""
