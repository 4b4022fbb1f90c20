"""The interface of a rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol

from compress.recipe import Recipe
from compress.search.candidate import Candidate, Record
from compress.search.setup import Setup

FAILED: Final = "failed"
"""Key of a record whose run failed: the reason."""


@dataclass(frozen=True)
class Verdict:
    """Why a candidate is dropped."""

    reason: str
    excess: dict[str, float] = field(default_factory=dict)
    """Excess over a goal, where that is the reason."""


class Rung(Protocol):
    """One rung: a measurement of each candidate, and the decision which of a wave are dropped by it."""

    NAME: ClassVar[str]
    ABOUT: ClassVar[str]
    """Its criterion, in a few words."""

    def absent(self, setup: Setup) -> str | None:
        """Returns in one line why a search has no use for this rung; None where it has, as always by default."""
        return None

    def recipe(self, candidate: Candidate, setup: Setup) -> Recipe:
        """Returns the recipe whose price stands for the measurement, by default that of the candidate."""
        return setup.recipe_of(candidate.values)

    def measure(self, candidate: Candidate, setup: Setup) -> Record:
        """Measures a candidate.

        Raises:
            InputError, ParityError, EngineError: The candidate cannot be built; the caller drops it for that reason.
        """

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        """Returns which candidates are dropped, by number, and why.

        Args:
            wave: The candidates of a wave that have come here, all measured.
            setup: The search.
        """
