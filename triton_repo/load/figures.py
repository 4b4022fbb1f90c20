"""The figures of a load: latencies, rates, errors, and how far the generator itself is to be trusted.

    latency_ms         of the requests that were answered, linear between two samples
    latency_of_all_ms  of all requests that were due; one without an answer (error or shed) is infinitely slow: None for such a quantile
    throughput         answered / max(seconds, time of the last answer)

A p99 needs 200 requests. The first line of latencies is what other tools show. The second one cannot be made better by losing requests: a
server that drops 2 % of them has no p99.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from triton_repo.client import MIN_FOR_P99
from triton_repo.load.generator import ERRORS, Samples
from triton_repo.load.settings import Load

MOST_CPU = 0.8
"""Share of a core above which the generator may limit the rate: its event loop has one thread."""
LATE_MS, LATE_SHARE = 1.0, 0.1
"""A p99 of the lag is worth a warning above both: milliseconds, and share of the p99 of the latency."""
KEPT_UP = 0.9
"""Share of the due requests per second below which the server did not keep up."""
COLUMNS = {
    "load": 16,
    "asked/s": 9,
    "sent/s": 9,
    "answered/s": 11,
    "rows/s": 9,
    "p50 ms": 9,
    "p90 ms": 9,
    "p99 ms": 9,
    "max ms": 9,
    "refused": 8,
    "timed out": 10,
    "failed": 7,
    "shed": 7,
    "late p99 ms": 12,
    "CPU": 6,
}
Array = NDArray[np.float64]


class Quantiles(TypedDict):
    """Quantiles in milliseconds; None where there are too few samples, or where a quantile is infinite."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Errors(Quantiles):
    """Requests that ended with one kind of error, and how long they took."""

    n: int
    first: NotRequired[str]
    """The first message."""


class Figures(TypedDict):
    """The figures of a load."""

    loop: Literal["open", "closed"]
    rate: float | None
    """Requests per second that were asked for."""
    concurrency: int | None
    rows: int
    """Rows of a request."""
    seconds: float
    timeout_s: float
    outstanding: int
    seed: int
    n: int
    """Requests that were due."""
    answered: int
    shed: int
    changed: int
    """Answers that differed from the first one to the same request."""
    latency_ms: Quantiles
    latency_of_all_ms: Quantiles
    errors: dict[str, Errors]
    """By kind."""
    sent_per_s: float
    throughput_per_s: float
    rows_per_s: float
    lag_ms: Quantiles
    cpu_share: float
    """Of one core."""
    warnings: list[str]


class RowBytes(TypedDict):
    """UTF-8, image or sound bytes of a row."""

    p50: int
    p90: int
    max: int


class Measured(Figures):
    """The figures of a load, and what was sent."""

    model: str
    prepared: int
    """Different requests that were sent in turn."""
    row_bytes: RowBytes
    rows_per_tier: NotRequired[list[int]]
    """Of a cascade the rows that each tier answered."""


def figures(samples: Samples, load: Load, changed: int = 0) -> Figures:
    """Returns the figures of a load, in JSON types.

    Args:
        samples: What happened to each request.
        load: The load.
        changed: Answers that differed from the first one to the same request.
    """
    kinds = np.array(samples.kinds, dtype=object)
    due, ended = np.array(samples.due, np.float64), np.array(samples.ended, np.float64)
    latency_ms, answered, shed = 1e3 * (ended - due), kinds == "answered", kinds == "shed"
    spent = float(ended[~shed].max(initial=load.seconds))
    throughput = float(answered.sum() / spent)
    found: Figures = {
        "loop": "closed" if load.rate is None else "open",
        "rate": load.rate,
        "concurrency": load.concurrency,
        "rows": load.rows,
        "seconds": load.seconds,
        "timeout_s": load.timeout_s,
        "outstanding": load.outstanding,
        "seed": load.seed,
        "n": len(kinds),
        "answered": int(answered.sum()),
        "shed": int(shed.sum()),
        "changed": changed,
        "latency_ms": _quantiles(latency_ms[answered]),
        "latency_of_all_ms": _quantiles(np.where(answered, latency_ms, np.inf)),
        "errors": {kind: _errors(latency_ms[kinds == kind]) for kind in ERRORS},
        "sent_per_s": round(float((~shed).sum() / (spent if load.rate is None else load.seconds)), 3),
        "throughput_per_s": round(throughput, 3),
        "rows_per_s": round(throughput * load.rows, 3),
        "lag_ms": _quantiles(1e3 * np.array(samples.lag)),
        "cpu_share": round(samples.cpu_seconds / samples.wall_seconds, 4) if samples.wall_seconds else 0.0,
        "warnings": [],
    }
    for kind, message in samples.first.items():
        if kind in ERRORS:
            found["errors"][kind]["first"] = message
    found["warnings"] = list(warnings(found))
    return found


def warnings(figures: Figures) -> Iterator[str]:
    """Yields a line for everything that a reader of the latencies must know."""
    if figures["cpu_share"] > MOST_CPU:
        yield f"the generator used {figures['cpu_share']:.2f} of a core: it was the limit itself, or close to it; use a lower rate"
    lag, slow = (about["p99"] or about["max"] or 0.0 for about in (figures["lag_ms"], figures["latency_ms"]))
    if lag > max(LATE_MS, LATE_SHARE * slow):
        effect = "which these latencies contain" if figures["loop"] == "open" else "so that answers were read late"
        yield (
            f"the generator was late by {lag:.1f} ms (p99; the latency's p99 is {slow:.1f} ms), {effect}; let it run on another machine, "
            "or use a lower rate"
        )
    if figures["shed"]:
        yield (
            f"{figures['shed']} of {figures['n']} requests were not sent, because {figures['outstanding']} were under way; the latencies "
            "leave out these, which would have waited longest"
        )
    for kind, about in figures["errors"].items():
        if about["n"]:
            yield f"{kind.replace('_', ' ')}: {about['n']} of {figures['n']} requests, first: {about['first']}"
    if figures["changed"]:
        yield (
            f"{figures['changed']} answers differed from the first one to the same request: the model is not deterministic, or another "
            "version of it answered"
        )
    due_per_s = figures["n"] / figures["seconds"]
    if figures["loop"] == "open" and figures["throughput_per_s"] < KEPT_UP * due_per_s:
        yield (
            f"{figures['throughput_per_s']:.1f} of {due_per_s:.1f} requests/s that were due were answered: the server did not keep up, or "
            "the test was short; latencies then grow with the length of the test"
        )


def header() -> str:
    """Returns the first line of a table of loads."""
    return _row(list(COLUMNS))


def line(figures: Figures) -> str:
    """Returns the line of a load."""
    closed, errors = figures["rate"] is None, figures["errors"]
    return _row(
        (
            f"concurrency {figures['concurrency']}" if closed else f"rate {figures['rate']:g}",
            None if closed else f"{figures['rate']:.1f}",
            *(f"{rate:.1f}" for rate in (figures["sent_per_s"], figures["throughput_per_s"], figures["rows_per_s"])),
            *(None if value is None else f"{value:.2f}" for value in figures["latency_ms"].values()),
            *(str(errors[kind]["n"]) for kind in ERRORS),
            str(figures["shed"]),
            None if figures["lag_ms"]["p99"] is None else f"{figures['lag_ms']['p99']:.2f}",
            f"{100 * figures['cpu_share']:.0f} %",
        )
    )


def tiers(rows: Sequence[int]) -> str:
    """Returns the line below a load of a cascade: rows and share of each tier."""
    shares = ", ".join(f"{number}: {count} ({100 * count / sum(rows):.1f} %)" for number, count in enumerate(rows, 1))
    return f"  rows by tier   {shares}"


def _row(cells: Sequence[str | None]) -> str:
    first, *others = ((cell or "-", width) for cell, width in zip(cells, COLUMNS.values(), strict=True))
    return f"{first[0]:<{first[1]}}" + "".join(f"{text:>{width}}" for text, width in others)


def _errors(latency_ms: Array) -> Errors:
    found = _quantiles(latency_ms)
    return {"n": len(latency_ms), "p50": found["p50"], "p90": found["p90"], "p99": found["p99"], "max": found["max"]}


def _quantiles(samples_ms: Array) -> Quantiles:
    """Returns the quantiles of samples."""
    method: Literal["linear", "higher"] = "linear" if np.isfinite(samples_ms).all() else "higher"  # no line leads to infinity

    def at(percent: int, least: int = 1) -> float | None:
        value = float(np.percentile(samples_ms, percent, method=method)) if len(samples_ms) >= least else np.inf
        return round(value, 4) if np.isfinite(value) else None

    return {"p50": at(50), "p90": at(90), "p99": at(99, MIN_FOR_P99), "max": at(100)}
