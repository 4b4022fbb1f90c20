"""The result of a budget as lines of text, and as budget.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from compress.budget.budget import Budget, Prediction, ends, study
from compress.budget.law import Fit, Law
from compress.budget.trainings import metric_of
from compress.recipe import Recipe
from compress.report import phrases
from foundation.artifacts.artifact import write_json
from foundation.machine import environment

FILE = "budget.json"
POINTS = 100


def describe(recipe: Recipe, out: Path | None = None) -> str:
    """Returns the result of a budget as text, and writes it; arguments and errors as of `compress.budget.budget.study`."""
    budget = study(recipe, out)
    file = write(budget)
    return "\n".join((*lines(budget), f"figures, parameters and intervals: {file}"))


def lines(budget: Budget) -> Iterator[str]:
    """Yields the lines of the plan."""
    studied, count = budget.studied, len(budget.answers[0].labels)
    first, last = (f"{number:,}" for number in (studied.short()[0].rows, studied.most_rows))
    yield f"how long to train: {studied.stage.key}, by {len(budget.answers)} short trainings of {first} to {last} rows in {budget.folder}"
    yield f"law of {_lossname(budget)} on {count:,} selection rows: {_law(budget.metric_fit)}"
    if budget.entropy_fit is not None:
        yield f"law of the cross entropy: {_law(budget.entropy_fit)}"
    heads = ("", "rows", "epochs", "layers", budget.judged.name, "90 %", unit(budget), "90 %", "time")
    yield "{:<18} {:>9} {:>7} {:>6} {:>10} {:>16} {:>7} {:>15} {:>8}".format(*heads)
    yield from (_line(one, budget) for one in budget.predictions)


def unit(budget: Budget) -> str:
    """Returns the unit of gains."""
    return "points" if scale(budget) == POINTS else "gain"


def scale(budget: Budget) -> int:
    """Returns what gains are multiplied by in the text: 100 for shares and correlations."""
    metric = budget.judged.metric
    return POINTS if metric.is_share or metric.is_correlation else 1


def write(budget: Budget) -> Path:
    """Writes budget.json; returns its path."""
    rows = [
        {
            **asdict(one.setting),
            "parameters": one.parameters,
            "seconds": one.seconds,
            "metric": float(metric_of(budget.judged, budget.metric.loss[index : index + 1])[0]),
            "cross_entropy": None if budget.entropy is None else float(budget.entropy.loss[index]),
        }
        for index, one in enumerate(budget.answers)
    ]
    document = {
        "stage": budget.studied.stage.title,
        "metric": budget.judged.name,
        "selection_rows": len(budget.answers[0].labels),
        "trainings": rows,
        "laws": {
            "metric": _parameters(budget.metric_fit),
            "cross_entropy": None if budget.entropy_fit is None else _parameters(budget.entropy_fit),
        },
        "alternatives": [{**asdict(one), "verdict": one.verdict} for one in budget.predictions],
        "environment": environment.fingerprint(),
    }
    file = budget.folder / FILE
    write_json(file, document)
    return file


def _parameters(fit: Fit) -> dict[str, list[float]]:
    """Returns each parameter of a law with the ends of its interval."""
    drawn = [law.parameters for law in fit.draws]
    spans = {name: ends(np.array([[one[name]] for one in drawn]))[0] for name in fit.law.parameters}
    return {name: [value, float(spans[name][0]), float(spans[name][1])] for name, value in fit.law.parameters.items()}


def _lossname(budget: Budget) -> str:
    name = budget.judged.name
    return f"1 - {name}" if budget.judged.metric.higher_is_better else name


def _law(fit: Fit) -> str:
    """Returns a law in one line, with the intervals of its exponents."""
    found = _parameters(fit)
    text = f"{found['E'][0]:.3f} + {_term(fit.law, 'A', 'alpha', 0)} ({fit.law.largest[0]:,.0f} / rows)^{_span(found['alpha'])}"
    if "B" in found:
        text += f" + {_term(fit.law, 'B', 'beta', 1)} ({fit.law.largest[1]:g} / layers)^{_span(found['beta'])}"
    again = f"repetition is worth at most {_span(found['R'])} epochs"
    return f"{text}; {again}; two trainings differ by {float(np.median(fit.scale)) * fit.noise * 2**0.5:.1%} of it"


def _term(law: Law, factor: str, exponent: str, axis: int) -> str:
    """Returns the size of a term at the largest of the trainings."""
    found = law.parameters
    return f"{found[factor] * law.largest[axis] ** -found[exponent]:.3f}"


def _span(parameter: list[float]) -> str:
    value, low, high = parameter
    return f"{value:.2f} [{low:.2f} to {high:.2f}]"


def _line(one: Prediction, budget: Budget) -> str:
    setting, times = one.alternative.setting, scale(budget)
    between = "{:.4f} to {:.4f}".format(*one.metric_interval)
    gain = "" if not one.verdict else f"{times * one.gain:+.1f}" if times == POINTS else f"{one.gain:+.4f}"
    digits = 1 if times == POINTS else 4
    gains = "" if not one.verdict else " to ".join(f"{times * end:+.{digits}f}" for end in one.gain_interval)
    layers = "" if setting.layers is None else str(setting.layers)
    cells = (one.alternative.name, f"{setting.rows:,}", f"{setting.epochs:g}", layers, f"{one.metric:.4f}", between, gain, gains)
    missing = f" (the data lack {one.alternative.missing:,} rows)" if one.alternative.missing else ""
    verdict = f"  {one.verdict}{missing}".rstrip()
    return "{:<18} {:>9} {:>7} {:>6} {:>10} {:>16} {:>7} {:>15} {:>8}".format(*cells, phrases.duration(one.seconds)) + verdict
