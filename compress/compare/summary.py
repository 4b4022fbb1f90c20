"""The outcome of a comparison in a few lines of plain ASCII text: each run, what it differs by from the earlier ones, and the page."""

from __future__ import annotations

from pathlib import Path

from compress.compare import machines
from compress.compare.document import PAGE
from compress.compare.model import Comparison
from compress.compare.page import change_in_words
from compress.report import phrases
from compress.report.summary import plain_text
from foundation.artifacts.figures import Accuracy


def summary(folder: Path, contents: Comparison) -> list[str]:
    """Returns one line for each run and for each pair of runs, one each for what differs in recipes and machines, and the path of the page.

    Args:
        folder: Where the comparison was written.
        contents: The contents of `compare.json`.
    """
    metric = contents.metric.name
    lines = []
    for run in contents.runs:
        cell, faster = run.accuracy, run.speedup.value
        speed = "not timed" if faster is None else f"{phrases.ratio(faster)} the speed of its own torch"
        size = "no engine" if run.size_bytes is None else phrases.size(run.size_bytes)
        value, n = phrases.figure(cell.value, run.metric), phrases.rows(Accuracy.model_validate(cell.written()))
        lines.append(f"{run.key} {run.folder}: {run.metric} {value} (n = {n}), {speed}, {size}")
    for pair in contents.pairs:
        if pair.kind == "served":
            lines.append(change_in_words(pair, metric))
    lines.append(f"recipe: {_count(len(contents.recipe), 'key')} differ" if contents.recipe else "recipe: the same")
    if (words := machines.in_words(contents.machine)) is not None:
        lines.append(f"machine: differs in {words}")
    lines.append("times of different runs were not measured in turns")
    return [*(plain_text(line) for line in lines), f"page: {folder / PAGE}"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
