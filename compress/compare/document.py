"""The comparison as plain data, `compare.json`, and as a page, `compare.html`.

`compare.json` is the machine interface; keys are only ever added. Times of different runs were not measured in turns, so no figure here
divides the time of one run by the time of another: a speed-up is against the torch reference of its own run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compress.compare import machines, page, recipes
from compress.compare.model import SCHEMA, Comparison
from compress.compare.pairs import pairs
from compress.compare.sides import Side, check_out, read_sides
from compress.compare.timing import NOT_IN_TURNS, configurations
from compress.report import goals
from foundation.artifacts.artifact import write_json, write_text
from foundation.core.step_names import EVALUATION
from foundation.measure.fastest import NAMES

FILE, PAGE = "compare.json", "compare.html"


def compare(folders: Sequence[Path], out: Path | None = None) -> tuple[Path, Comparison]:
    """Writes the comparison of finished runs.

    Args:
        folders: Run folders, two or more, of one task. The others are compared with the first.
        out: The folder to write, outside of every run; default: comparisons/<names of the folders>.

    Returns:
        The folder, and the contents of `compare.json`.

    Raises:
        InputError: See `compress.compare.sides`; or a run is damaged, or `out` is inside a run.
    """
    sides = read_sides(folders)
    out = out or Path("comparisons") / "-".join(side.path.resolve().name for side in sides)[:100]
    check_out(out, sides)
    contents = Comparison.model_validate(collect(sides))
    html = page.render(contents, sides)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, contents.written())
    write_text(out / PAGE, html)
    return out, contents


def collect(sides: Sequence[Side]) -> dict[str, object]:
    """Returns the comparison as plain data, in the schema of `compare.json`."""
    first = sides[0]
    return {
        "schema": SCHEMA,
        "task": first.run.recipe["model"]["task"],
        "metric": {"name": first.metric_name, "higher_is_better": first.report.metric.higher_is_better is not False},
        "runs": [_run(side) for side in sides],
        "pairs": pairs(sides),
        "configurations": configurations(sides),
        "ledger": list(_ledger(sides)),
        "recipe": recipes.differences({side.key: side.run.recipe for side in sides}),
        "machine": machines.differences(sides),
        "timing": NOT_IN_TURNS,
    }


def _run(side: Side) -> dict[str, object]:
    report, baseline = side.report, side.run.baseline
    backend, cost, faster = side.served_backend, goals.drop(side.report), goals.speedup(side.report)
    cell = goals.accuracy(report)
    return {
        "key": side.key,
        "name": report.name,
        "folder": str(side.path),
        "created": report.created,
        "anchor": report.integrity.anchor,
        "metric": side.metric_name,
        "baseline": {"variant": baseline, "checkpoint": side.run.artifacts[baseline].digest},
        "rows": {
            "n": side.run.artifacts[f"{EVALUATION}{baseline}"].metrics.get("n"),
            "sha256": report.evaluation_rows.sha256,
        },
        "served": None if report.served is None else {name: getattr(report.served, name) for name in NAMES},
        "accuracy": {"backend": backend, **{key: getattr(cell, key) for key in ("value", "low", "high", "n", "in_train")}},
        "drop": {key: getattr(cost, key) for key in ("value", "low", "high", "reason")},
        "speedup": {key: getattr(faster, key) for key in ("value", "low", "high", "at", "busy", "reason")},
        "size_bytes": goals.served_size(report),
        "goals": [goal.written() for goal in report.goals],
        "machine": machines.machine(report),
        "defaulted": recipes.defaulted(side.run.recipe),
        "warnings": list(report.warnings),
    }


def _ledger(sides: Sequence[Side]) -> Iterator[dict[str, object]]:
    """Yields the primary metric of every variant in every backend of every run, or why it was not measured."""
    keys = ("value", "low", "high", "n", "groups", "in_train", "interval_reason", "reason")
    for side in sides:
        for variant in side.report.variants:
            for backend, cell in variant.accuracy.items():
                yield {
                    "run": side.key,
                    "variant": variant.id,
                    "backend": backend,
                    **{key: getattr(cell, key) for key in keys},
                }
