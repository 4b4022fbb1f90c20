"""Estimates that rank candidates before their full training: the known objectives, as losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compress.search.candidate import Candidate, Record
from compress.search.halving import survivors
from compress.search.rungs.rung import Verdict
from compress.search.setup import Setup

ESTIMATES = {"metric": "the metric", "latency": "time", "throughput": "time for a row", "size": "bytes"}
"""Proxy of each objective; time is relative to the baseline, or in multiply-accumulates."""


def losses(candidate: Candidate, rung: str, setup: Setup) -> tuple[float, ...]:
    """Returns a value for each objective, smaller is better.

    The metric is measured at a rung. Time is the time of the untrained shape, relative to the baseline, or else its multiply-accumulates.
    Size is counted from the weights.
    """
    size, latency = candidate.records["size"], candidate.records.get("latency", Record())
    metric = float(candidate.records[rung]["metric"]) * (-1 if setup.metric.higher_is_better else 1)
    time = float(latency.get("relative", size["macs"]))
    known = {"metric": metric, "latency": time, "throughput": time, "size": float(size["weight_bytes"])}
    return tuple(known[name] for name in setup.search.objectives)


def halved(wave: Sequence[Candidate], rung: str, setup: Setup) -> dict[int, Verdict]:
    """Returns the candidates that successive halving drops (`compress.search.halving`), with what they were beaten by.

    The recipe itself is never dropped by comparison: a search ends with how it compares with what was there before.
    """
    points = {one.number: losses(one, rung, setup) for one in wave}
    kept = survivors(points, setup.search.halving.keep) if points else []
    dropped = [one.number for one in wave if one.number not in kept and not one.own]
    return {number: Verdict(_why(number, kept, points, setup)) for number in dropped}


def _why(number: int, survivors: Sequence[int], points: Mapping[int, Sequence[float]], setup: Setup) -> str:
    """Returns the objectives of a candidate next to the objectives of the candidates that went on."""
    told = []
    for index, name in enumerate(setup.search.objectives):
        own, others = points[number][index], [points[other][index] for other in survivors]
        sign = -1 if name == "metric" and setup.metric.higher_is_better else 1
        low, high = sorted((sign * min(others), sign * max(others)))
        told.append(f"{ESTIMATES[name]} {sign * own:.4g} ({low:.4g} to {high:.4g})")
    return f"{len(survivors)} of {len(points)} are promoted, and this one is not among them; next to theirs it has {', '.join(told)}"
