"""How soon the watch over a served cascade sees a planted shift, and how often it rings without one, on stored predictions.

    python benchmarks/server/cascade_shift.py --cascade DIR [--escalated 0.1] [--other FILE] [--share 0.1 0.2 0.3 0.5] [--audit 0.005 0.05]
        [--streams 200] [--length 100000] [--quiet 0 20000] [--out FILE]
    python benchmarks/server/cascade_shift.py --planted

Streams are drawn with replacement from the certificate rows of the artifact of the stage `cascade` (DIR holds cascade.json and the
predictions of its tiers), a row in each request. The tests are those of the server (`triton_repo.cascade.served.watch`), value by value:

    none        no shift: streams whose alarm rings, of all; at most `false_alarm` of them should. Once more with bounds that are the rates
                of the pool itself, the worst case of that promise
    escalation  rows that the first tier is not sure of come more often: a share of the stream is drawn from the escalated rows alone
    confident   a share of the stream is kept rows whose answer the last tier gives otherwise: only the audit sees them
    other       a share of the stream is rows of FILE, predictions of the same tiers for rows of another domain (tier.1, tier.2, ...)

Figures are delays in requests from the shift to the alarm, over the streams: median, p90, and streams without an alarm. With `--planted`
the pool is made up: margins of two classes, of which 9 % are escalated and 0.6 % kept and answered otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from export.cascade.certificate import upper_limit
from foundation.artifacts.cascade import FILE, TIER, Cascade
from foundation.artifacts.document import read
from foundation.standalone.confidence import confidence, route
from foundation.standalone.e_process import EProcess
from triton_repo.cascade.served.watch import different

STEP = 50
"""Requests between two looks at the tests."""


@dataclass(frozen=True)
class Pool:
    """Rows: whether each goes beyond the first tier, and whether it is kept and the last tier answers otherwise."""

    escalated: NDArray[np.bool_]
    wrong: NDArray[np.bool_]

    @classmethod
    def of(cls, document: Cascade, logits: Sequence[NDArray[np.float32]]) -> Pool:
        """Returns the rows of the stored predictions of all tiers."""
        tiers = [tier for tier in document.tiers if tier.score is not None]
        scores = [confidence(one, tier.score.score) for one, tier in zip(logits, tiers, strict=False) if tier.score is not None]
        answering = route(scores, [None if tier.threshold is None else float(tier.threshold) for tier in tiers])
        answers = np.stack(logits)[answering, np.arange(len(answering))]
        form = "class" if tiers[0].score is None else tiers[0].score.form
        return cls(answering > 0, different(logits[-1], answers, form, document.certificate.distance))

    @classmethod
    def planted(cls, rows: int = 100_000) -> Pool:
        """Returns a pool of which 9 % are escalated and 0.6 % kept and answered otherwise."""
        draw = np.random.default_rng(0).random(rows)
        return cls(draw < 0.09, (draw >= 0.09) & (draw < 0.096))


@dataclass(frozen=True)
class Rates:
    """What the tests are held to."""

    upper: float
    bound: float
    audit: float
    false_alarm: float


def delays(pools: tuple[Pool, Pool], share: float, rates: Rates, quiet: int, length: int, streams: int) -> NDArray[np.float64]:
    """Returns for each stream the requests from the shift to the first alarm, infinite without one; at most 0 where it rang before.

    Args:
        pools: Where rows come from before the shift, and the share of them afterwards.
        share: Share of the rows of the second pool after the shift.
        rates: Bounds, audit and probability of a false alarm.
        quiet: Requests before the shift.
        length: Requests after it.
        streams: Number of streams.
    """
    draw = np.random.default_rng(0)
    alpha = rates.false_alarm / 2
    escalation = EProcess(rates.upper, (streams,))
    audits = [EProcess(rates.bound) for _ in range(streams)]
    rang = np.full(streams, np.inf)
    for start in range(-quiet, length, STEP):
        places = [draw.integers(0, len(pool.escalated), (streams, STEP)) for pool in pools]
        second = draw.random((streams, STEP)) < (share if start >= 0 else 0.0)
        escalated, wrong = (
            np.where(second, getattr(pools[1], name)[places[1]], getattr(pools[0], name)[places[0]]) for name in ("escalated", "wrong")
        )
        escalation.update(escalated.astype(np.float64))
        audited = draw.random((streams, STEP)) < rates.audit
        for stream in np.flatnonzero(audited.any(axis=1)):
            audits[stream].update(wrong[stream, audited[stream]].astype(np.float64))
        now = escalation.alarms(alpha) | np.array([bool(one.alarms(alpha)) for one in audits])
        rang = np.minimum(rang, np.where(now, start + STEP, np.inf))
        if share and np.isfinite(rang).all():
            break
    return rang


def shown(found: NDArray[np.float64]) -> dict[str, float | int | None]:
    """Returns median and p90 of the delays, and the streams without an alarm or with one before the shift."""
    seen = found[found > 0]
    quantiles = [float(np.quantile(seen, q, method="higher")) for q in (0.5, 0.9)]
    median, p90 = (None if math.isinf(value) else value for value in quantiles)
    return {"median": median, "p90": p90, "none": int(np.isinf(seen).sum()), "before": len(found) - len(seen), "streams": len(found)}


def at_share(document: Cascade, share: float) -> Cascade:
    """Returns a cascade of two tiers at the point of its path that escalates about this share of the certificate rows, which may be another
    point than the certified one."""
    count = document.certificate.n
    point = min(document.certificate.path.points, key=lambda one: abs(one.escalated[0] / count - share))
    limit = upper_limit(point.escalated[0], count, 1 - float(document.escalation[0].confidence))
    first = document.tiers[0].with_(threshold=point.thresholds[0])
    return document.with_(tiers=(first, *document.tiers[1:]), escalation=(document.escalation[0].with_(upper=limit),))


def arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cascade", type=Path)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--other", type=Path)
    parser.add_argument("--escalated", type=float)
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--audit", type=float, nargs="+", default=[0.005, 0.05])
    parser.add_argument("--false-alarm", type=float, default=0.05)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--length", type=int, default=100_000)
    parser.add_argument("--quiet", type=int, nargs="+", default=[0, 20_000])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if (given.cascade is None) != given.planted:
        parser.error("give --cascade DIR or --planted")
    return given


def main() -> None:
    """Prints the figures."""
    given = arguments()
    if given.planted:
        pool, upper, bound = Pool.planted(), 0.11, 0.01
    else:
        document = read(Cascade, given.cascade / FILE)
        if given.escalated is not None:
            document = at_share(document, given.escalated)
        stored = load_file(given.cascade / document.certificate.predictions)
        pool = Pool.of(document, [stored[f"{TIER}{tier.number}"] for tier in document.tiers])
        upper, bound = float(document.escalation[0].upper), float(document.certificate.bound)
    others = {"escalation": pool.escalated, "confident": pool.wrong}
    pools = {name: Pool(pool.escalated[rows], pool.wrong[rows]) for name, rows in others.items() if rows.any()}
    if given.other is not None and not given.planted:
        stored = load_file(given.other)
        pools["other"] = Pool.of(document, [stored[f"{TIER}{tier.number}"] for tier in document.tiers])
    print(f"pool: {len(pool.escalated)} rows, {pool.escalated.mean():.4f} escalated (bound {upper:g}),", end=" ")
    print(f"{pool.wrong.mean():.4f} kept and answered otherwise (bound {bound:g})")
    print(f"false alarm at most {given.false_alarm:g}, {given.streams} streams of {given.length} requests")
    figures = []
    for audit in given.audit:
        rates = Rates(upper, bound, audit, given.false_alarm)
        edge = Rates(float(pool.escalated.mean()), float(pool.wrong.mean()), audit, given.false_alarm)
        for name, limits in (("none", rates), ("none, at the bounds", edge)):
            if not (0 < limits.upper < 1 and 0 < limits.bound < 1):
                continue
            rang = int(np.isfinite(delays((pool, pool), 0.0, limits, 0, given.length, given.streams)).sum())
            figures.append({"shift": name, "audit": audit, "alarms": rang, "streams": given.streams})
            print(f"audit {audit:g}, shift {name}: {rang} of {given.streams} streams rang", flush=True)
        for name, second in pools.items():
            for share in given.share:
                for quiet in given.quiet:
                    one = shown(delays((pool, second), share, rates, quiet, given.length, given.streams))
                    figures.append({"shift": name, "share": share, "quiet": quiet, "audit": audit, **one})
                    print(f"audit {audit:g}, {name} {share:g} after {quiet} requests:", end=" ")
                    print(f"median {one['median']}, p90 {one['p90']}, none {one['none']}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
