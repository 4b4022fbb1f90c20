"""Rung 3: the model without training: pruned without recovery, quantized after training; its metric on selection rows.

Candidates are halved by it (`compress.search.halving`), but only those whose metric is within `MOST_LOST` of the baseline's: further down
it says little about what training brings back, so these stay unjudged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.recipe import Recipe
from compress.search.baseline import Baseline
from compress.search.candidate import Candidate, Record
from compress.search.rungs.estimate import halved
from compress.search.rungs.evaluated import evaluated
from compress.search.rungs.rung import Rung, Verdict
from compress.search.setup import Setup
from compress.search.training import training_in, training_of, untrained

MOST_LOST = 0.2


class WithoutTraining(Rung):
    """Evaluates a candidate that was not trained; see above.

    Args:
        baseline: Its metric is what the loss is counted from.
    """

    NAME: ClassVar[str] = "untrained"
    ABOUT: ClassVar[str] = "quantized without training"

    def __init__(self, baseline: Baseline | None = None) -> None:
        self._baseline = baseline

    def absent(self, setup: Setup) -> str | None:
        """It needs stages that can leave their training out, and none that cannot."""
        needed = [str(stage.id) for stage in setup.own if training_of(stage) == "needed"]
        if needed:
            return f"{needed[0]} makes its model by training"
        kinds = set().union(*(training_in(setup, setup.recipe_of(values)) for values in setup.each_value()))
        return None if "optional" in kinds else "no stage trains, so the whole run is this rung"

    def recipe(self, candidate: Candidate, setup: Setup) -> Recipe:
        """The recipe of the candidate without training."""
        return untrained(setup, setup.recipe_of(candidate.values))

    def measure(self, candidate: Candidate, setup: Setup) -> Record:
        """Returns `metric` on selection rows, in torch, and `told`: whether it is near enough to the baseline to be compared by it."""
        assert self._baseline is not None, "the baseline runs first"
        value = evaluated(self.recipe(candidate, setup), setup.run_folder(candidate, self.NAME), setup)
        return {"metric": value, "told": setup.metric.drop(self._baseline.metric, value) <= MOST_LOST}

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        """Drops by halving."""
        return halved([one for one in wave if one.records[self.NAME]["told"]], self.NAME, setup)
