"""State that all candidates of a search share: the recipe, its knobs, the data and the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from compress.forecast import PlannedStep, looked_up, predicted
from compress.pipeline import check_server
from compress.recipe import Recipe, dump, written
from compress.run.prepare import context_of, prepare
from compress.search.candidate import Candidate
from compress.search.space import Knob, Values, each_value, knobs_of, recipe_of, words
from compress.search_settings import Search
from export.export import Export
from foundation.artifacts.artifact import digest
from foundation.artifacts.run_folder import Run
from foundation.core.errors import InputError, Problem
from foundation.core.progress import ConsoleProgress
from foundation.core.step_names import EVALUATION
from foundation.data.splits import Data
from foundation.measure.judged import Judged, judged_of
from foundation.measure.metrics import Metric
from foundation.stage.context import Context
from foundation.stage.stage import Stage

TRIALS, FRONT = "trials", "front"


@dataclass(frozen=True)
class Setup:
    """A search that was checked; `Setup.of` makes one."""

    recipe: Recipe
    knobs: tuple[Knob, ...]
    folder: Path
    """The search folder."""
    data: Data
    """Judged on selection rows."""
    progress: ConsoleProgress
    """Progress of the search itself; the runs of candidates write to their own logs."""
    _predicted: dict[str, list[PlannedStep]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, recipe: Recipe, folder: Path, progress: ConsoleProgress) -> Setup:
        """Loads the data and checks the recipe of every combination, and every value against the model.

        Raises:
            InputError: The recipe or the space is wrong; one line for each problem.
        """
        knobs = knobs_of(recipe)
        check_server(recipe)
        setup = cls(recipe, knobs, folder, prepare(recipe, folder, ConsoleProgress("silent"), judge="selection").data, progress)
        timed = [name for name in setup.search.objectives if name in ("latency", "size", "throughput")]
        if timed and not any(isinstance(stage, Export) for stage in recipe.stages):
            raise InputError(
                "search.objectives", f"{', '.join(timed)} given, but no engine is built", remedy="add `- export: {}` to the stages"
            )
        problems: dict[Problem, str] = {}
        for values in setup.each_value():
            try:
                setup.context_of(setup.recipe_of(values)).count_macs()
            except InputError as error:
                problems.update({problem: words(values) for problem in error.problems if problem not in problems})
        if problems:
            raise InputError.of(problem.within(f"search.space: with {given}") for problem, given in problems.items())
        return setup

    @property
    def search(self) -> Search:
        """The section of the recipe."""
        assert self.recipe.search is not None, "checked by knobs_of"
        return self.recipe.search

    @cached_property
    def judged(self) -> Judged:
        """The metric that is judged: `goals.metric`, else the primary one."""
        return judged_of(self.recipe.model.task, self.recipe.goals.metric, self.data.labels)

    @property
    def metric(self) -> Metric:
        """The judged metric."""
        return self.judged.metric

    @property
    def metric_name(self) -> str:
        """Its name."""
        return self.judged.name

    def metric_of(self, run: Run, variant: str) -> float:
        """Returns the judged metric of a variant of a run in torch."""
        return self.judged.figure(run.artifacts[f"{EVALUATION}{variant}"].metrics["metrics"], run.predictions(variant))

    @cached_property
    def base(self) -> dict[str, object]:
        """The recipe as its author wrote it, plain data."""
        return written(self.recipe)

    @cached_property
    def shared(self) -> tuple[Stage, ...]:
        """The stages before the first one that a knob changes: every candidate begins with them."""
        changed = {knob.stage for knob in self.knobs}
        first = next(index for index, stage in enumerate(self.recipe.stages) if stage.id in changed)
        return tuple(self.recipe.stages[:first])

    @property
    def own(self) -> tuple[Stage, ...]:
        """The stages after those, without export and server."""
        rest = self.recipe.stages[len(self.shared) :]
        return tuple(stage for stage in rest if stage.PRODUCES == "checkpoint")

    def recipe_of(self, values: Mapping[str, object]) -> Recipe:
        """Returns the recipe of a candidate, which serves nothing: a server says no more of it than its engine does.

        Raises:
            InputError: A stage refuses a value.
        """
        return without_servers(recipe_of(self.base, values))

    def each_value(self) -> list[Values]:
        """Returns combinations of values in which every value occurs, of a range its ends."""
        return list(each_value(self.knobs))

    def context_of(self, recipe: Recipe) -> Context:
        """Returns the context of the first step of a recipe, on the data of the search."""
        return context_of(recipe, self.data, self.folder, ConsoleProgress("silent"))

    def progress_of_run(self) -> ConsoleProgress:
        """Returns the progress of the run of one candidate: its log file gets everything, the terminal only where all is asked for."""
        return ConsoleProgress("normal" if self.progress.volume == "verbose" else "silent")

    def forecast(self, recipe: Recipe) -> list[PlannedStep]:
        """Returns the prediction for every step of a recipe, with what the store already holds."""
        context, key = self.context_of(recipe), digest(dump(recipe))
        if key not in self._predicted:  # shapes take a second, and are asked for again and again
            self._predicted[key] = predicted(recipe, context)
        return list(looked_up(self._predicted[key], self.folder, context))

    def run_folder(self, candidate: Candidate, rung: str) -> Path:
        """Returns the run folder of a candidate on a rung."""
        return self.folder / TRIALS / candidate.name / rung


def without_servers(recipe: Recipe) -> Recipe:
    """Returns a recipe that serves nothing."""
    return recipe.model_copy(
        update={"stages": tuple(stage for stage in recipe.stages if stage.PRODUCES not in ("model_repository", "cascade"))}
    )
