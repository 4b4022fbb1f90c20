"""The outcome of a run in a few lines of plain text: accuracy before and after, speed-up, size, and missed goals.

The text is ASCII, so that it prints on any console. A figure that was not measured is replaced by the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compress.report import phrases
from compress.report.decision import Decision, decision_of
from compress.report.model.contents import Contents, Goal
from compress.report.sections.cascade import headline

WIDTH = 12
"""Width of the name column, characters."""
_ASCII = str.maketrans({phrases.SPACE: " ", phrases.MINUS: "-", phrases.TIMES: "x", "\u2013": "-", "\u2060": None})


def summary(report: Contents, folder: Path) -> list[str]:
    """Returns the outcome of a run.

    Args:
        report: The report of the run.
        folder: The run folder.

    Returns:
        One line for a served cascade, one each for the judged metric, speed and size, and the chosen single model, one for another metric
        that lost far more, one for the goals if there are any, one for every goal that was missed or not judged, one for every finding
        that does not hold, and the path of the HTML page.
    """
    decision, cascade = decision_of(report), headline(report)
    metric, other = decision.metric, decision.worst_other
    lines = [
        *([] if cascade is None else [_line("served", "".join(text for text, _ in cascade))]),
        _line(metric or "accuracy", _accuracy(decision)),
        *([] if other is None else [_line(other.metric, phrases.moved(other))]),
        _line("speed", _speed(decision)),
        _line("size", _size(decision)),
        *_chosen(decision, "served" if cascade is None else "alone"),
    ]
    judged = decision.goals
    if judged:
        lines.append(_line("goals", phrases.goals_sentence(judged).lower()))
    lines += [_line("", text) for text in _open_goals(judged, metric)]
    lines += [_line("finding", _unmet(found, metric)) for found in decision.findings if found.met is False]
    return [*lines, f"{'report':<{WIDTH}}{folder / 'report.html'}"]


def _chosen(decision: Decision, name: str) -> Iterator[str]:
    if decision.served:
        yield _line(name, f"{phrases.configuration(decision.served)}: {decision.reason}")


def missed_goals(report: Contents) -> list[str]:
    """Returns a line for each goal that a run missed; each starts with the word missed."""
    return [plain_text(line) for line in _open_goals(report.goals, report.metric.name) if line.startswith("missed")]


def plain_text(text: str) -> str:
    """Returns a text as ASCII for a console: other characters are replaced by similar ones, or escaped."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def _line(name: str, text: str) -> str:
    return plain_text(f"{name:<{WIDTH}}{text}")


def _accuracy(decision: Decision) -> str:
    before, after, cost, metric = decision.before, decision.after, decision.cost, decision.metric
    if decision.hop is None or cost.value is None:
        return f"not measured: {cost.reason}"
    spread, chance = phrases.change_interval(cost.low, cost.high, metric), decision.no_better_than
    worth = "" if chance is None else f"; no better than a model that knows nothing: {phrases.figure(chance, metric)}"
    return (
        f"{phrases.figure(before.value, metric)} in torch -> {phrases.figure(after.value, metric)} in"
        f" {phrases.engine_name(decision.hop)} (n = {phrases.rows(after)}; change {phrases.change(cost.value, metric)}"
        f"{f', 95 % interval {spread}' if spread else ''}){worth}"
    )


def _speed(decision: Decision) -> str:
    faster = decision.speedup
    if faster.value is None:
        return f"not measured: {faster.reason}"
    words = f"{phrases.ratio(faster.value)} faster" if faster.value >= 1 else f"{phrases.ratio(1 / faster.value)} slower"
    trust = phrases.trust_in(faster.low, faster.high, faster.busy)
    return f"{words} than torch fp32 at the worst shape ({phrases.place(faster.at)}{f'; {trust}' if trust else ''})"


def _size(decision: Decision) -> str:
    if decision.size_bytes is None:
        return f"not measured: no files were built for {decision.engine or 'any engine'}"
    smaller, size = decision.size_ratio, phrases.size(decision.size_bytes)
    if smaller is None:
        return f"{size} deployed; the baseline was not exported"
    words = f"{phrases.ratio(smaller)} smaller" if smaller >= 1 else f"{phrases.ratio(1 / smaller)} larger"
    return f"{phrases.size(decision.baseline_bytes)} -> {size} deployed ({words})"


def _open_goals(judged: Sequence[Goal], metric: str | None) -> Iterator[str]:
    for goal in judged:
        if goal.met is None:
            yield f"not judged: {phrases.goal_name(goal, metric)}: {goal.reason or phrases.NO_REASON}"
        elif not goal.met:
            yield f"missed: {_unmet(goal, metric)}"


def _unmet(goal: Goal, metric: str | None) -> str:
    """Returns the measured value of a missed goal or a failed finding, and the reason."""
    where, both = f" ({phrases.place(goal.at)})" if goal.at else "", phrases.both_latencies(goal)
    measured = f"measured {phrases.goal_value(goal, metric)}{where}{f'; {both}' if both else ''}"
    return f"{phrases.goal_name(goal, metric)}; {measured}{f'; {goal.reason}' if goal.reason else ''}"
