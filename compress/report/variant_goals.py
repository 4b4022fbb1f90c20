"""Goals of single variants (`goals.variants`), such as the members of a family, judged like the goals of what is served.

A variant is judged as if it were the last one of its run and served in the first engine of the target:

    max_drop      baseline in torch - the variant in that engine
    min_speedup   min over shapes of p50(`over`) / p50(variant), both in that engine; without `over` against the baseline in torch
"""

from __future__ import annotations

from collections.abc import Mapping

from compress.report import goals
from compress.report.model.contents import Contents, Goal
from foundation.core.goals import Goals, VariantGoals


def judge_variants(limits: Mapping[str, VariantGoals], report: Contents) -> list[Goal]:
    """Judges the goals of single variants.

    Args:
        limits: The goals by the id of the variant.
        report: The report, as for `compress.report.goals.judge`.

    Returns:
        The goals that are set, in the order of the recipe.
    """
    return [goal for name, limit in limits.items() for goal in _judge(name, limit, report)]


def _judge(name: str, limits: VariantGoals, report: Contents) -> list[Goal]:
    own = as_last(report, name)
    settings = {key: getattr(limits, key) for key in ("max_drop", "min_speedup", "max_size_mb")}
    judged = goals.judge(Goals(**settings), own)
    if limits.over is not None:
        figure = speedup_over(report, name, limits.over)
        judged = [goals.at_least("min_speedup", limits.min_speedup, figure) if goal.goal == "min_speedup" else goal for goal in judged]
    over = {"over": limits.over} if limits.over is not None else {}
    return [goal.with_(variant=name, **(over if goal.goal == "min_speedup" else {})) for goal in judged]


def as_last(report: Contents, name: str) -> Contents:
    """Returns a report whose last variant is the one with that id, and which says nothing of what is served.

    A variant that the run does not have, as after `compress publish` of a part, has no figures.
    """
    ids = [variant.id for variant in report.variants]
    variants = report.variants[: ids.index(name) + 1] if name in ids else ()
    return report.with_(served=None, variants=variants)


def speedup_over(report: Contents, name: str, over: str) -> goals.Figure:
    """Returns the speed-up of a variant over another one in the first engine of the target, at the worst shape."""
    own, other = as_last(report, name), as_last(report, over)
    engine, fast, slow = goals.served_engine(own), goals.served_cells(own), goals.served_cells(other)
    for variant, cells in ((name, fast), (over, slow)):
        if not cells:
            return goals.Figure(reason=f"{variant} was not timed in {engine or 'any engine'}")
    return goals.least_ratio(slow, fast, engine, over)
