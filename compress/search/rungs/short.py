"""Rung 4: every training for a share of its epochs; the metric on selection rows, by which candidates are halved.

Schedules are shortened with the epochs, so that the learning rate ends where it would. No engine is built: the time comes from rung 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.recipe import Recipe
from compress.search.candidate import Candidate, Record
from compress.search.rungs.estimate import halved
from compress.search.rungs.evaluated import evaluated
from compress.search.rungs.rung import Rung, Verdict
from compress.search.setup import Setup
from compress.search.training import shortened, training_in


class ShortTraining(Rung):
    """Trains for a short time; see above."""

    NAME: ClassVar[str] = "short"
    ABOUT: ClassVar[str] = "short training"

    def absent(self, setup: Setup) -> str | None:
        """It needs a stage that trains."""
        kinds = set().union(*(training_in(setup, setup.recipe_of(values)) for values in setup.each_value()))
        return None if kinds & {"needed", "optional"} else "no stage trains"

    def recipe(self, candidate: Candidate, setup: Setup) -> Recipe:
        """The recipe of the candidate with fewer epochs."""
        return shortened(setup, setup.recipe_of(candidate.values), setup.search.halving.short)

    def measure(self, candidate: Candidate, setup: Setup) -> Record:
        """Returns `metric` on selection rows, in torch."""
        return {"metric": evaluated(self.recipe(candidate, setup), setup.run_folder(candidate, self.NAME), setup)}

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        """Drops by halving."""
        return halved(wave, self.NAME, setup)
