"""The certificate of a cascade in the report: the promise in one sentence, what it does not cover, the tiers, and risk against coverage."""

from __future__ import annotations

from compress.report import phrases
from compress.report.charts.lines import LineChart, Series, line_chart
from compress.report.model.contents import Contents
from compress.report.view import View
from foundation.artifacts.cascade import Cascade, PathPoint, Tier, Times

MOST_POINTS = 60
"""Points of the curve of risk against coverage."""
SCORES = {
    "margin": "difference of the two largest logits",
    "entropy": "entropy of the probabilities",
    "energy": "free energy of the logits",
    "calibrated": "logistic model of margin, entropy and energy; of numbers and vectors a linear model of their distance",
}


def cascade(report: Contents) -> View | None:
    """Returns the certificate and a row for each tier; None where no stage made a cascade."""
    found = report.cascade
    if found is None or not found.tiers:
        return None
    return {
        "promise": promise(found),
        "drop": _drop(found),
        "left_out": _left_out(found),
        "tiers": [_tier(found, number) for number in range(len(found.tiers))],
        "times": None if found.times is None else _times(found.times.cascade),
        "mix": None if found.times is None else f"{found.times.rows:,} evaluation rows",
        "curve": _curve(found),
        "original": found.original.variant,
    }


def headline(report: Contents) -> list[tuple[str, bool]] | None:
    """Returns what is served in one sentence, where it is the cascade; None where it is a single model.

    Returns:
        The parts of the sentence, each with whether it is printed bold.
    """
    found = report.cascade
    if found is None or not found.tiers or report.triton.cascade is None:
        return None
    certificate, names = found.certificate, ", then ".join(tier.variant for tier in found.tiers)
    sure = f" of its answers are {_other(found)} of {found.original.variant}, with confidence {percent(certificate.confidence)}"
    parts = [(f"A cascade ({names}) is served: at most ", False), (percent(certificate.bound), True), (sure, False)]
    if found.times is None or not found.times.tiers:
        return [*parts, (".", False)]
    mean, last = (f"{phrases.milliseconds(one.mean_ms)}{phrases.SPACE}ms" for one in (found.times.cascade, found.times.tiers[-1]))
    instead = f" on average instead of {last} in the engine of {found.original.variant}."
    return [*parts, (", and a row takes ", False), (mean, True), (instead, False)]


def promise(found: Cascade) -> str:
    """Returns the certificate in one sentence."""
    certificate = found.certificate
    return (
        f"With confidence {percent(certificate.confidence)}, at most {percent(certificate.bound)} of the answers are {_other(found)} "
        f"of {found.original.variant} in torch (fp32): {certificate.disagreements:,} of {certificate.n:,} certificate rows are."
    )


def _other(found: Cascade) -> str:
    """Returns what is counted: other answers, or answers that are too far away."""
    limit = found.certificate.max_distance
    return "other ones than those" if limit is None else f"farther than {limit:.4g} from those"


def percent(share: float) -> str:
    """Returns a share in percent with the digits that it needs: `0.5 %`, `1 %`, `99.9 %`."""
    return f"{100 * share:.4g}{phrases.SPACE}%"


def _drop(found: Cascade) -> str | None:
    """Returns the second bound in one sentence; None where none was named."""
    second = found.certificate.max_drop
    if second is None:
        return None
    return (
        f"With the same confidence the share of right answers drops by at most {100 * second.limit:.4g} points; on the certificate rows it "
        f"changes by {phrases.signed(-100 * float(second.drop))}."
    )


def _left_out(found: Cascade) -> str | None:
    """Returns what was done with rows that other splits have too; None where there was none."""
    shared = found.certificate.rows_shared
    one = "row of the files is a train, selection or evaluation row too, and was"
    several = "rows of the files are train, selection or evaluation rows too, and were"
    return f"{shared:,} {one if shared == 1 else several} left out." if shared else None


def _tier(found: Cascade, number: int) -> View:
    tier, n = found.tiers[number], found.certificate.n
    rows = found.rows_per_tier[number] if number < len(found.rows_per_tier) else None
    alone = found.times.tiers[number] if found.times is not None and number < len(found.times.tiers) else Times()
    beyond = next((one for one in found.escalation if one.tier == tier.number), None)
    return {
        "variant": tier.variant,
        "what": f"{phrases.engine_name(tier.engine)}, {tier.precision}, {tier.mode}",
        "score": None if tier.score is None else tier.score.name,
        "title": None if tier.score is None else SCORES.get(tier.score.name),
        "threshold": _threshold(tier, last=number == len(found.tiers) - 1),
        "share": phrases.NOT_MEASURED if rows is None or not n else phrases.share(rows / n),
        "disagreements": f"{tier.disagreements_alone:,} of {n:,}",
        "beyond": None if beyond is None else f"{phrases.share(beyond.rate)}, at most {phrases.share(beyond.upper)}",
        "times": _times(alone),
    }


def _threshold(tier: Tier, *, last: bool) -> str:
    if last:
        return "answers all others"
    if tier.threshold is None:
        return "keeps no row"
    return "keeps all rows" if tier.threshold < -1e30 else f"{tier.threshold:.4g}"


def _times(found: Times) -> list[str]:
    """Returns mean, p50, p90 and p99, without their unit."""
    return [phrases.milliseconds(value) for value in (found.mean_ms, found.p50_ms, found.p90_ms, found.p99_ms)]


def _coverage(point: PathPoint, n: int) -> float:
    """Returns the rows that are answered before the last tier, in percent."""
    return 100 * (1 - point.escalated[-1] / n)


def _curve(found: Cascade) -> LineChart | None:
    """Returns the share of other answers against the share of rows that are answered before the last tier, on certificate rows."""
    n, points = found.certificate.n, found.certificate.path.points
    if not n or not points:
        return None
    step = max(1, len(points) // MOST_POINTS)
    some = sorted({*range(0, len(points), step), found.certificate.path.chosen, len(points) - 1})
    places = {_coverage(points[number], n): 100 * points[number].disagreements / n for number in some}
    chosen = points[found.certificate.path.chosen]
    title = f"chosen: {chosen.disagreements} of {n} other answers at {_coverage(chosen, n):.1f} %"
    return line_chart("other answers, %", "rows answered before the last tier, %", [Series("", title, sorted(places.items()))])
