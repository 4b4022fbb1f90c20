"""The comparison as one self-contained HTML page, in the house style of the report (`compress.report.page`).

Charts, ledger cells and number formats come from the report. This page adds the differences between runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from compress.compare import machines
from compress.compare.model import Compared, Comparison, Model, Pair, TimedConfiguration
from compress.compare.sides import Side
from compress.compare.timing import NOT_IN_TURNS, one_metric, points, references, shapes_of
from compress.report import goals, phrases
from compress.report.labelled import labelled
from compress.report.page import state_of, template
from compress.report.sections import accuracy
from compress.report.view import View, plain
from foundation.artifacts.figures import Accuracy, Drop
from foundation.labels.tasks import TASKS

COLOURS = 8
"""Runs beyond these share colours; every point is labelled with the letter of its run."""
ABSENT = {"known": False, "reason": "not in this run"}


def render(contents: Comparison, sides: Sequence[Side]) -> str:
    """Returns the page of a comparison.

    Args:
        contents: The contents of `compare.json`.
        sides: The runs.

    Returns:
        One self-contained HTML document.
    """
    metric = contents.metric.name
    page = template("compare.html.j2").render(
        name=" and ".join(side.key for side in sides) if len(sides) == 2 else f"{len(sides)} runs",
        task=contents.task,
        verdict=_verdict(contents),
        metric=metric,
        lower_is_better=not contents.metric.higher_is_better,
        unit=TASKS[contents.task].counts,
        runs=[_run(run, colour) for run, colour in zip(contents.runs, _colours(sides), strict=True)],
        pairs=[_pair(pair, contents) for pair in contents.pairs if pair.kind == "served"],
        timing=_timing_note(contents),
        plots=_plots(sides) if one_metric(sides) else [],
        no_plot=None if one_metric(sides) else "the runs are judged by different metrics",
        times=_times(contents),
        ledger=_ledger(contents, sides),
        recipe=[_difference(row.path, row.values, sides) for row in contents.recipe],
        defaulted=[{"key": run.key, "paths": ", ".join(run.defaulted)} for run in contents.runs if run.defaulted],
        machine=[_difference(row.name, row.values, sides) for row in contents.machine],
    )
    return labelled(page)


def _colours(sides: Sequence[Side]) -> list[int]:
    return [number % COLOURS + 1 for number in range(len(sides))]


def _verdict(contents: Comparison) -> str:
    """Returns the outcome in one sentence."""
    runs, metric = contents.runs, contents.metric.name
    if len(runs) == 2:
        return change_in_words(contents.pairs[0], metric)
    known = [run for run in runs if run.accuracy.value is not None and run.metric == metric]
    if not known:
        return f"{len(runs)} runs, none of which was evaluated"
    low, high = (choose(known, key=lambda run: run.accuracy.value or 0.0) for choose in (min, max))
    ends = [f"{phrases.figure(run.accuracy.value, metric)} ({run.key})" for run in (low, high)]
    return f"{len(runs)} runs: {metric} from {ends[0]} to {ends[1]}"


def change_in_words(pair: Pair, metric: str) -> str:
    """Returns the difference of two runs in the metric, or why it is unknown, in one line."""
    if pair.first is None or pair.second is None:
        return f"{metric} cannot be compared: {pair.reason}"
    names = f"{pair.second.run} against {pair.first.run}"
    if pair.reason is not None:
        return f"{names}: {metric} cannot be paired row by row: {pair.reason}"
    values = f"{phrases.figure(pair.first_value, metric)} to {phrases.figure(pair.second_value, metric)}"
    spread = phrases.change_interval(pair.low, pair.high, metric)
    told = f" (95{phrases.SPACE}% interval {spread}): {_significance(pair)}" if spread else ", no interval"
    return f"{names}: {metric} {values}, change {phrases.change(pair.difference, metric)}{told}"


def _significance(pair: Pair) -> str:
    second = "" if pair.second is None else pair.second.run
    if pair.low is not None and pair.low > 0:
        return f"{second} is worse"
    return f"{second} is better" if pair.high is not None and pair.high < 0 else "no difference is shown"


def _run(run: Compared, colour: int) -> View:
    metric, cell, cost, faster = run.metric, run.accuracy, run.drop, run.speedup
    return {
        "key": run.key,
        "colour": colour,
        "name": run.name or "unnamed",
        "folder": run.folder,
        "created": run.created,
        "served": phrases.configuration(run.served) if run.served else f"{run.baseline.variant} and later, no engine was built",
        "metric": metric,
        "value": phrases.figure(cell.value, metric),
        "backend": phrases.engine_name(cell.backend),
        "spread": phrases.interval(cell.low, cell.high, metric),
        "n": phrases.rows(Accuracy.model_validate(cell.written())),
        "change": phrases.change(cost.value, metric),
        "change_spread": phrases.change_interval(cost.low, cost.high, metric),
        "no_change": cost.reason or phrases.NO_REASON,
        "speedup": phrases.ratio(faster.value) if faster.value is not None else None,
        "speedup_spread": None if faster.low is None else f"{phrases.ratio(faster.low)} to {phrases.ratio(faster.high)}",
        "busy": faster.busy,
        "at": phrases.place(faster.at),
        "no_speedup": faster.reason or phrases.NO_REASON,
        "size": phrases.size(run.size_bytes),
        "goals": phrases.goals_sentence(run.goals),
        "state": state_of(run.goals),
        "warnings": len(run.warnings),
    }


def _pair(pair: Pair, contents: Comparison) -> View:
    metric, known = contents.metric.name, pair.reason is None
    view: View = {"first": _model(pair.first), "second": _model(pair.second), "known": known, "reason": pair.reason}
    if not known:
        return view
    lost, gained = pair.right_to_wrong, pair.wrong_to_right
    return view | {
        "values": [phrases.figure(value, metric) for value in (pair.first_value, pair.second_value)],
        "change": phrases.change(pair.difference, metric),
        "spread": phrases.change_interval(pair.low, pair.high, metric),
        "no_spread": pair.interval_reason or phrases.NO_REASON,
        "verdict": _significance(pair) if pair.low is not None else None,
        "flips": f"{lost} lost, {gained} gained" if lost is not None else None,
        "n": phrases.rows(Accuracy.model_validate(pair.written())),
    }


def _model(names: Model | None) -> View:
    if names is None:
        return {"run": "", "what": "nothing was evaluated"}
    return {"run": names.run, "what": f"{names.variant} in {phrases.engine_name(names.backend)}"}


def _timing_note(contents: Comparison) -> str:
    """Returns the note next to every figure that compares times: not measured in turns, and what else differs."""
    words = machines.in_words(contents.machine)
    same = "the recorded machine and versions are the same"
    spoiled = list(dict.fromkeys(one.run for one in contents.configurations if one.busy))
    busy = f" Other work on the machine spoiled times of {', '.join(spoiled)}." if spoiled else ""
    return f"{NOT_IN_TURNS}; {f'the runs also differ in {words} (see Machines)' if words else same}.{busy}"


def _plots(sides: Sequence[Side]) -> list[View]:
    """Returns for each shape its plot of the metric against latency, with the front of each run and the joint one."""
    runs = [
        {"key": side.key, "colour": colour, "name": side.report.name or "unnamed"}
        for side, colour in zip(sides, _colours(sides), strict=True)
    ]
    all_points = {shape: [point for _, point in points(sides, shape)] for shape in shapes_of(sides)}
    return [
        {
            "title": phrases.place(goals.shape_name(shape)),
            **accuracy.plot(sides[0].report.metric, shown, (480, 380)),
            "runs": runs,
            "references": _references(sides, shape),
        }
        for shape, shown in all_points.items()
        if shown
    ]


def _references(sides: Sequence[Side], shape: goals.Shape) -> View:
    """Returns the time of the baseline in torch of each run, and whether it is the same model everywhere: if so, the times show how similar
    the measuring conditions were."""
    times = [f"{side.key} {phrases.milliseconds(references(side.report).get(shape))} ms" for side in sides]
    checkpoints = {side.run.artifacts[side.run.baseline].digest for side in sides}
    return {"times": ", ".join(times), "same": len(checkpoints) == 1}


def _times(contents: Comparison) -> list[View]:
    """Returns a table of the configurations at each shape, the fastest first."""
    metric = contents.metric.name
    tables: dict[goals.Shape, list[TimedConfiguration]] = {}
    for one in contents.configurations:
        tables.setdefault((one.batch or 1, one.sequence), []).append(one)
    return [
        {
            "title": phrases.place(goals.shape_name(shape)),
            "rows": [
                {
                    "run": one.run,
                    "name": f"{one.variant}, {one.precision} on {phrases.engine_name(one.engine)}",
                    "mode": one.mode,
                    "busy": one.busy,
                    "p50": phrases.milliseconds(one.p50_ms),
                    "speedup": phrases.ratio(one.speedup) if one.speedup is not None else phrases.NOT_MEASURED,
                    "value": phrases.figure(one.value, metric),
                    "fronts": " and ".join(name for name, on in (("own", one.front), ("joint", one.joint_front)) if on),
                    "role": {"served": "served", "reference": "torch reference"}.get(one.role),
                }
                for one in sorted(rows, key=lambda one: one.p50_ms or 0.0)
            ],
        }
        for shape, rows in tables.items()
    ]


def _ledger(contents: Comparison, sides: Sequence[Side]) -> list[View]:
    """Returns a row for each variant and backend of any run, with a cell for each run and its paired change against the first."""
    cells = {(one.variant, one.backend, one.run): one for one in contents.ledger}
    ends = [end for one in contents.ledger for end in (one.low, one.high, one.value) if end is not None]
    scale = (min(ends), max(ends)) if ends else (0.0, 1.0)
    pairs = [(pair.second, pair) for pair in contents.pairs if pair.kind == "same name" and pair.second is not None]
    drops: dict[tuple[str | None, str, str], Drop] = {
        (one.variant, one.backend, one.run): Drop.model_validate(pair.written()) for one, pair in pairs
    }
    order = [backend for backend in accuracy.BACKENDS if any(one.backend == backend for one in contents.ledger)]
    rows = []
    for variant in dict.fromkeys(one.variant for one in contents.ledger):
        for backend in order:
            here = [cells.get((variant, backend, side.key)) for side in sides]
            if not any(cell is not None and cell.value is not None for cell in here):
                continue  # nobody measured it
            before = here[0].value if here[0] else None
            row = [
                accuracy.cell_of(
                    Accuracy.model_validate(cell.written()),
                    drops.get((variant, backend, side.key), Drop()),
                    side.metric_name,
                    scale,
                    before,
                )
                if cell
                else ABSENT
                for side, cell in zip(sides, here, strict=True)
            ]
            rows.append({"variant": variant, "backend": phrases.engine_name(backend), "cells": row})
    return rows


def _difference(path: str, values: Mapping[str, object], sides: Sequence[Side]) -> View:
    """Returns one key and its value in each run; None where the run does not have it."""
    return {"path": path, "values": [_value(values[side.key]) if side.key in values else None for side in sides]}


def _value(value: object) -> str:
    """Returns a value as it would stand in a recipe, on one line."""
    if value is None or isinstance(value, bool | str | int | float):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else plain(value)
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()
