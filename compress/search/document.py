"""The outcome of a search as plain data, `search.json`, and as a page, `search.html`.

`search.json` is the machine interface; keys are only ever added. Figures of `candidates` are measured on selection rows, figures of
`front[].evaluation` on the evaluation split, with intervals.
"""

from __future__ import annotations

from collections.abc import Mapping

from compress.report import goals as judged
from compress.report.model.contents import Contents
from compress.search import page
from compress.search.baseline import Baseline
from compress.search.candidate import Candidate, Record
from compress.search.model import SCHEMA, Search
from compress.search.points import Front, name_of, recipe_file, why_recommended
from compress.search.rungs.full import OF_A_KIND, figures_of, names_of
from compress.search.setup import FRONT, Setup
from compress.search.space import Knob, num_combinations
from compress.search.study import Study
from compress.search.work import rungs_of
from compress.search_settings import Range
from foundation.artifacts.artifact import write_json, write_text
from foundation.machine import environment

FILE, PAGE = "search.json", "search.html"
Reports = Mapping[int, Contents]
"""The report of each point of the front on the evaluation split."""


def write(setup: Setup, study: Study, before: Baseline, front: Front, reports: Reports) -> Search:
    """Writes `search.json` and `search.html`; returns the contents of the former."""
    contents = Search.model_validate(collect(setup, study, before, front, reports))
    write_json(setup.folder / FILE, contents.written())
    write_text(setup.folder / PAGE, page.render(contents))
    return contents


def collect(setup: Setup, study: Study, before: Baseline, front: Front, reports: Reports) -> dict[str, object]:
    """Returns the outcome of a search as plain data, in the schema of `search.json`."""
    candidates = study.candidates()
    fingerprint = environment.fingerprint()
    points = [_point(one, setup, reports[one.number]) for one in front.candidates]
    chosen = next((point for one, point in zip(front.candidates, points, strict=True) if one is front.chosen), None)
    return {
        "schema": SCHEMA,
        "name": setup.recipe.name,
        "task": setup.recipe.model.task,
        "environment": {**fingerprint["hardware"], "versions": fingerprint["versions"]},
        "metric": {"name": setup.metric_name, "higher_is_better": setup.metric.higher_is_better},
        "objectives": list(setup.search.objectives),
        "goals": setup.recipe.goals.model_dump(mode="json", exclude_none=True),
        "budget": setup.search.budget.model_dump(mode="json"),
        "halving": setup.search.halving.model_dump(mode="json"),
        "rows": {"selection": len(setup.data.selection), "evaluation": len(setup.data.hidden or setup.data.evaluation)},
        "space": [_knob(knob) for knob in setup.knobs],
        "combinations": num_combinations(setup.knobs),
        "rungs": [{"name": rung.NAME, "about": rung.ABOUT, "left_out": absent} for rung, absent in rungs_of(setup).items()],
        "seconds": round(study.baseline_seconds + sum(one.seconds for one in candidates), 1),
        "baseline": {"metric": before.metric},
        "candidates": [_candidate(one, front, setup) for one in candidates],
        "importances": study.importances(),
        "meets_goals": front.meets,
        "front": points,
        "recommended": chosen and {**chosen, "reason": why_recommended(front, setup.search.objectives, setup)},
    }


def _knob(knob: Knob) -> dict[str, object]:
    kind = "range" if isinstance(knob.domain, Range) else "choices"
    return {"path": knob.path, "kind": kind, **knob.domain.model_dump(mode="json", exclude_none=True)}


def _candidate(one: Candidate, front: Front, setup: Setup) -> dict[str, object]:
    """Returns a candidate: its values, what every rung said, and what became of it."""
    full = one.records.get("full", Record())
    return {
        "number": one.number,
        "name": one.name,
        "wave": one.wave,
        "own": one.own,
        "values": dict(one.values),
        "state": one.state,
        "front": one in front.candidates,
        "dropped": None if one.dropped is None else {"rung": one.dropped.rung, "reason": one.dropped.reason},
        "rungs": {name: dict(record) for name, record in one.records.items()},
        "results": full.get("results") if one.results is not None else None,
        "missed": full.get("missed", []) if one.results is not None else [],
        "feasible": one.feasible,
        "seconds": round(one.seconds, 1),
        "run": str(setup.run_folder(one, "full").relative_to(setup.folder)) if one.results is not None else None,
    }


def _point(one: Candidate, setup: Setup, report: Contents) -> dict[str, object]:
    """Returns a point of the front: its figures on selection rows, and on the evaluation split with intervals."""
    figures, cost = figures_of(report), judged.drop(report)
    cell = judged.accuracy(report)
    return {
        "number": one.number,
        "name": name_of(one, setup),
        "values": dict(one.values),
        "recipe": str(recipe_file(one, setup).relative_to(setup.folder)),
        "run": f"{FRONT}/{name_of(one, setup)}",
        "selection": one.records["full"]["results"],
        "evaluation": {
            **{name: value for name, value in figures.items() if name != "metric"},
            "metric": {key: getattr(cell, key) for key in ("value", "low", "high", "n")},
            "drop": {"value": cost.value, "low": cost.low, "high": cost.high},
            "speedup": judged.speedup(report).value,
        },
        "served": names_of(report),
        "goals": [goal.written() for goal in report.goals],
        "missed": [name for name in judged.missed(report) if name not in OF_A_KIND],
    }
