"""The figures of a load: latencies, rates, errors, and how far the generator itself is to be trusted.

    latency_ms         of the requests that were answered, linear between two samples
    latency_of_all_ms  of all requests that were due; one without an answer (error or shed) is infinitely slow: None for such a quantile
    throughput         answered / max(seconds, time of the last answer)

A p99 needs 200 requests. The first line of latencies is what other tools show. The second one cannot be made better by losing requests: a
server that drops 2 % of them has no p99.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from triton_repo.client import MIN_FOR_P99
from triton_repo.load.generator import ERRORS, Samples
from triton_repo.load.settings import Load

QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
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


def figures(samples: Samples, load: Load, changed: int = 0) -> dict[str, Any]:
    """Returns the figures of a load, in JSON types.

    Args:
        samples: What happened to each request.
        load: The load.
        changed: Answers that differed from the first one to the same request.

    Returns:
        `loop` (open, closed), `rate` (requests per second, asked), `concurrency`, `rows` (of a request), `seconds`, `timeout_s`,
        `outstanding`, `seed`; `n` (requests that were due), `answered`, `shed`, `changed`; `latency_ms` and `latency_of_all_ms` (p50, p90,
        p99, max); `errors` (for each kind `n`, its own latencies, and its `first` message); `sent_per_s`, `throughput_per_s`, `rows_per_s`;
        `lag_ms` (p50, p90, p99, max), `cpu_share` (of one core), `warnings`.
    """
    kinds = np.array(samples.kinds, dtype=object)
    due, ended = np.array(samples.due, np.float64), np.array(samples.ended, np.float64)
    latency_ms, answered, shed = 1e3 * (ended - due), kinds == "answered", kinds == "shed"
    spent = float(ended[~shed].max(initial=load.seconds))
    throughput = float(answered.sum() / spent)
    found: dict[str, Any] = {
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
        "errors": {kind: {"n": int((kinds == kind).sum()), **_quantiles(latency_ms[kinds == kind])} for kind in ERRORS},
        "sent_per_s": round(float((~shed).sum() / (spent if load.rate is None else load.seconds)), 3),
        "throughput_per_s": round(throughput, 3),
        "rows_per_s": round(throughput * load.rows, 3),
        "lag_ms": _quantiles(1e3 * np.array(samples.lag)),
        "cpu_share": round(samples.cpu_seconds / samples.wall_seconds, 4) if samples.wall_seconds else 0.0,
    }
    for kind, message in samples.first.items():
        if kind in ERRORS:
            found["errors"][kind]["first"] = message
    return {**found, "warnings": list(warnings(found))}


def warnings(figures: Mapping[str, Any]) -> Iterator[str]:
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


def line(figures: Mapping[str, Any]) -> str:
    """Returns the line of a load."""
    closed, errors = figures["rate"] is None, figures["errors"]
    return _row(
        (
            f"concurrency {figures['concurrency']}" if closed else f"rate {figures['rate']:g}",
            None if closed else f"{figures['rate']:.1f}",
            *(f"{figures[key]:.1f}" for key in ("sent_per_s", "throughput_per_s", "rows_per_s")),
            *(None if value is None else f"{value:.2f}" for value in figures["latency_ms"].values()),
            *(str(errors[kind]["n"]) for kind in ERRORS),
            str(figures["shed"]),
            None if figures["lag_ms"]["p99"] is None else f"{figures['lag_ms']['p99']:.2f}",
            f"{100 * figures['cpu_share']:.0f} %",
        )
    )


def _row(cells: Sequence[str | None]) -> str:
    first, *others = ((cell or "-", width) for cell, width in zip(cells, COLUMNS.values(), strict=True))
    return f"{first[0]:<{first[1]}}" + "".join(f"{text:>{width}}" for text, width in others)


def _quantiles(samples_ms: Array) -> dict[str, float | None]:
    """Returns the quantiles of samples; None where there are too few, or where a quantile is infinite."""
    found: dict[str, float | None] = {}
    for name, percent in QUANTILES.items():
        least = MIN_FOR_P99 if name == "p99" else 1
        method: Literal["linear", "higher"] = "linear" if np.isfinite(samples_ms).all() else "higher"  # no line leads to infinity
        value = float(np.percentile(samples_ms, percent, method=method)) if len(samples_ms) >= least else np.inf
        found[name] = round(value, 4) if np.isfinite(value) else None
    return found
