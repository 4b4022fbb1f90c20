"""The decision of a run: what is served, and every figure of it that the report states.

One frozen value, made from report.json. The summary on the console, the headline of the page, the goals, the sizes, the chart, the ledger
and the reason of the choice all read it, so that they cannot say different things.

    hop        the last backend that evaluated exactly what is served: a server, else its engine, else torch
    cost       what the judged metric lost from the baseline in torch to the hop, with its paired interval
    others     what every other metric of the task lost on the same way
    size       the files that the engine of what is served loads
    rows       its latency by shape: these rows are the served ones in the chart and in the tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.report import goals
from compress.report.goals import Figure, Shape
from compress.report.model.contents import Contents, Goal, Ranked, Served
from compress.report.model.variant import Latency, Variant
from foundation.artifacts.figures import Accuracy, Drop, Metrics
from foundation.core.engines import REFERENCE
from foundation.measure.metrics import METRICS

NOTABLE = 2.0
"""A metric that loses more than this many times what the judged one does is named next to it."""
SMALLEST = 0.005
"""Smallest loss of another metric that is worth a remark."""


@dataclass(frozen=True)
class Change:
    """A metric of the baseline in torch, and of what is served."""

    metric: str
    before: float
    after: float
    lost: float
    """`Metric.drop`: positive is a loss."""


@dataclass(frozen=True)
class Decision:
    """The served configuration of a run, and its figures."""

    served: Served | None
    """The served configuration; None in older reports, which serve the last variant in the first engine."""
    variant: Variant
    """The variant that is served; an empty one where the run has none."""
    is_baseline: bool
    """Whether that is the variant that all others are compared with."""
    engine: str | None
    metric: str | None
    """The metric that is judged."""
    hop: str | None
    """Backend of `after`; None where what is served was not evaluated."""
    before: Accuracy
    """The metric of the baseline in torch."""
    after: Accuracy
    """The metric of what is served at the hop."""
    no_better_than: float | None
    """The metric of a model that ignores its input, where what is served is no better at the hop; None where it is better."""
    accuracy: Mapping[str, Accuracy]
    """The metric of exactly what is served by backend."""
    drops: Mapping[str, Drop]
    """Its loss in each of these backends."""
    cost: Figure
    """Loss of the metric; positive is a loss."""
    others: tuple[Change, ...]
    """The other metrics of the task, as far as both ends are known."""
    speedup: Figure
    """Over the baseline in torch, at the worst shape."""
    rows: Mapping[Shape, Latency]
    """Latency rows of what is served, by shape; the objects of the report itself."""
    size_bytes: int | None
    """Bytes of the files that its engine loads."""
    baseline_bytes: int | None
    """The same of the baseline in the first engine of the target."""
    goals: tuple[Goal, ...]
    """The goals, as in report.json."""
    findings: tuple[Goal, ...]
    """Judgements without a goal in the recipe."""
    reason: str | None
    """Why this is served, in one line; None in reports that do not say."""
    ranking: tuple[Ranked, ...]
    """The configurations that competed, what is served first; empty where they did not."""

    @property
    def missed(self) -> tuple[str, ...]:
        """The goals that were judged and missed."""
        return tuple(str(goal.goal) for goal in self.goals if goal.met is False)

    @property
    def size_ratio(self) -> float | None:
        """How many times smaller it is than the baseline; None if either size is unknown."""
        return self.baseline_bytes / self.size_bytes if self.baseline_bytes and self.size_bytes else None

    @property
    def worst_other(self) -> Change | None:
        """The other metric that lost most, if the judged one says far less: by `NOTABLE` times and more."""
        lost = [change for change in self.others if change.lost >= SMALLEST and change.lost > NOTABLE * (self.cost.value or 0)]
        return max(lost, key=lambda change: change.lost, default=None)

    def serves(self, row: Latency) -> bool:
        """Whether a latency row of the report is one of what is served."""
        return any(row is one for one in self.rows.values())


def decision_of(report: Contents) -> Decision:
    """Returns the decision of a run."""
    block, variant, first = report.served, goals.served_variant(report), goals.baseline(report)
    hop, accuracy = goals.last_backend(report), goals.served_accuracy(report)
    after, ranking = accuracy.get(hop or "", Accuracy()), () if block is None else block.ranking
    return Decision(
        served=block,
        variant=variant,
        is_baseline=variant is not goals.NOTHING and variant is first,
        engine=goals.served_engine(report),
        metric=report.metric.name,
        hop=hop,
        before=goals.before(report),
        after=after,
        no_better_than=report.metric.chance if goals.knows_nothing(after.value, report) else None,
        accuracy=accuracy,
        drops={name: cell for name, cell in goals.served_drops(report).items() if name in accuracy},
        cost=goals.drop(report),
        others=_others(report, hop),
        speedup=goals.speedup(report),
        rows=goals.served_cells(report),
        size_bytes=goals.served_size(report),
        baseline_bytes=first.size_bytes,
        goals=report.goals,
        findings=report.findings,
        reason=None if block is None else _reason(block.reason, ranking, [goal for goal in report.goals if goal.variant is None]),
        ranking=ranking,
    )


def _others(report: Contents, hop: str | None) -> tuple[Change, ...]:
    """Returns the losses in the other metrics, of the served configuration if the report has its metrics."""
    before = _named(goals.baseline(report).metrics.get(REFERENCE, {}))
    own = goals.served_variant(report).metrics if report.served is None else report.served.metrics
    after = _named(own.get(hop or "", {}))
    names = [name for name in before if name in after and name in METRICS and name != report.metric.name]
    return tuple(Change(name, before[name], after[name], METRICS[name].drop(before[name], after[name])) for name in names if before[name])


def _named(figures: Metrics) -> dict[str, float]:
    return {name: value for name, value in figures.items() if isinstance(value, float)}


def _reason(reason: str | None, ranking: tuple[Ranked, ...], judged: Sequence[Goal]) -> str | None:
    """Returns why this is served. Configurations are ranked by their engines; what was judged later, such as behind the server, counts."""
    missed = list(dict.fromkeys(str(goal.goal) for goal in judged if goal.met is False))
    if not ranking:
        return reason
    own = ranking[0].missed
    later = [name for name in missed if name not in own]
    fine = sum(not one.missed for one in ranking)
    if own:
        reason = f"no configuration meets every goal; this one misses {', '.join(own)}, "
        reason += f"and is {_which(ranking)} of those that miss the fewest"
        return reason + (f"; the run also misses {', '.join(later)}" if later else "")
    unjudged = any(goal.met is None for goal in judged)
    if fine == 1 < len(ranking):
        only = f"the only one of {len(ranking)} configurations that"
        if later:
            return f"{only} meets the goals in its engine; the run misses {', '.join(later)}"
        return f"{only} {'misses no goal' if unjudged else 'meets the goals'}"
    among = f"{_which(ranking)} of the {fine} configurations" if fine < len(ranking) else f"{_which(ranking)} of {fine} configurations"
    of = f", of {len(ranking)}" if fine < len(ranking) else ""
    if not judged:
        return among + of
    if later:
        return f"{among} that meet the goals in their engines{of}; the run misses {', '.join(later)}"
    if unjudged:
        return f"{among} that miss no goal{of}"
    return f"{among} that meet the goals{of}" if of else f"{among}, which all meet the goals"


def _which(ranking: tuple[Ranked, ...]) -> str:
    """Explains how the first configuration was chosen among those that miss equally few goals."""
    times = [one.time_ms for one in ranking if len(one.missed) == len(ranking[0].missed) and one.time_ms]
    mine = ranking[0].time_ms
    if not times or not mine or mine <= min(times):
        return "the fastest"
    return f"the smallest or simplest of those within {100 * (mine / min(times) - 1):.1f} % of the fastest"
