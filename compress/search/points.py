"""The points of the front: each a recipe that `compress run` takes, run once on the evaluation split.

`front/NAME.yaml` is the recipe, `front/NAME/` its run: the checkpoints come from the store, engines are built and evaluated again, on the
evaluation rows that no candidate has seen, and served if the recipe serves. Evaluation rows are used only here. The
engines and their times come from this run, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from compress.pipeline import run
from compress.recipe import Recipe, check
from compress.report.model.contents import Contents
from compress.report.report import FILE
from compress.search.candidate import Candidate
from compress.search.front import front_of, recommended
from compress.search.setup import FRONT, Setup
from compress.search.space import plain_of, words
from compress.search.study import Study
from foundation.artifacts.artifact import read_json, write_text
from foundation.artifacts.store import claimed, share
from foundation.core.shown import pasted

PAUSE_S = 0.5
LONGEST_NAME = 58


@dataclass(frozen=True)
class Front:
    """The candidates that no other one beats."""

    candidates: tuple[Candidate, ...]
    """Sorted by rising loss of the first objective."""
    meets: bool
    """Whether they meet the goals on selection rows; if no candidate does, the front is built from all finished candidates."""
    chosen: Candidate | None
    """The recommended one."""


def front(study: Study, setup: Setup) -> Front:
    """Returns the front of a study, by figures of selection rows."""
    done = [one for one in study.candidates() if one.results is not None]
    meeting = [one for one in done if one.feasible]
    judged = {one.number: study.losses(one.results or ()) for one in meeting or done}
    numbers = front_of(judged)
    by_number = {one.number: one for one in done}
    points = {number: judged[number] for number in numbers}
    if meeting:
        chosen = recommended(points, setup.search.objectives, setup.recipe.goals)
    else:
        chosen = min(
            numbers, key=lambda number: (sum(max(0.0, value) for value in by_number[number].excess.values()), number), default=None
        )
    order = sorted(numbers, key=lambda number: (points[number], number))
    return Front(tuple(by_number[number] for number in order), bool(meeting), None if chosen is None else by_number[chosen])


def name_of(candidate: Candidate, setup: Setup) -> str:
    """Returns the name of a point and of its run."""
    return f"{setup.recipe.name[:LONGEST_NAME]}-{candidate.name}"


def recipe_file(candidate: Candidate, setup: Setup) -> Path:
    """Returns the path of the recipe of a point."""
    return setup.folder / FRONT / f"{name_of(candidate, setup)}.yaml"


def write_recipe(candidate: Candidate, setup: Setup) -> Recipe:
    """Writes the recipe of a point; returns it."""
    path, name = recipe_file(candidate, setup), name_of(candidate, setup)
    plain = plain_of(setup.base, candidate.values, name)
    recipe = check(plain)
    head = f"# A point of the front of the search {setup.recipe.name}: {words(candidate.values)}.\n# {pasted('compress', 'run', path)}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, head + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120))
    return recipe


def evaluate(front: Front, setup: Setup) -> dict[int, Contents]:
    """Runs every point of the front on the evaluation split, or finds it run; returns the reports by candidate.

    Several processes share the points; each of them returns when all are done.
    """
    reports: dict[int, Contents] = {}
    while missing := [one for one in front.candidates if one.number not in reports]:
        before = len(reports)
        for one in missing:
            folder = setup.folder / FRONT / name_of(one, setup)
            with claimed(setup.folder / FRONT / f".{one.name}.lock") as mine:
                if mine:
                    setup.progress.log(f"front: {one.name} on the evaluation split ({words(one.values)})")
                    share(folder, setup.folder)
                    run(write_recipe(one, setup), folder, progress=setup.progress_of_run())
                    reports[one.number] = Contents.model_validate(read_json(folder / FILE))
        if len(reports) == before:
            time.sleep(PAUSE_S)
    return reports


def why_recommended(front: Front, objectives: Sequence[str], setup: Setup) -> str:
    """Returns in one line why the recommended point was chosen."""
    if front.chosen is None:
        return "no candidate has finished"
    if not front.meets:
        return "no candidate meets the goals on selection rows; this one exceeds them least"
    goals = setup.recipe.goals
    costs = [name for name in objectives if name != "metric"]
    if (goals.max_drop is not None or goals.max_bleu_drop is not None) and costs:
        best = {"latency": "fastest", "size": "smallest", "throughput": "point with the highest throughput"}[costs[0]]
        return f"the {best} of the front: all its points meet the goals on selection rows"
    if goals.max_latency_ms or (goals.min_speedup, goals.max_size_mb, goals.min_throughput) != (None, None, None):
        return "the best metric of the front: all its points meet the goals on selection rows"
    return "the point of the front nearest to the best of every objective; no goal says which of them counts"
