"""The exception for wrong user input: recipe, model folder, data, image or request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

MOST_PROBLEMS = 50
LONGEST_PROBLEM = 2000
COMPARED_NAMES = 1000
COMPARED_CHARACTERS = 64
"""Names that are compared for a suggestion, and their length: the comparison takes quadratic time."""


@dataclass(frozen=True)
class Problem:
    """One fault of the input. `str(problem)` is the line that a user reads, `KEY: GIVEN; ALLOWED: REMEDY`; a long line loses its middle."""

    key: str
    """Path of the key, or file and line."""
    given: str
    """Present value or state."""
    allowed: str = ""
    """Allowed values, or the rule that is broken."""
    remedy: str = ""
    """Action that mends it."""

    def __str__(self) -> str:
        before_remedy = "; " if not self.allowed or ": " in self.allowed or self.allowed.endswith("?") else ": "
        rest = before_remedy.join(part for part in (self.allowed, self.remedy) if part)
        return _line(": ".join(part for part in (self.key, "; ".join(part for part in (self.given, rest) if part)) if part))

    def within(self, outer: str) -> Problem:
        """Returns the problem with a longer key, such as the file in which the key stands."""
        return replace(self, key=f"{outer}: {self.key}" if self.key else outer)

    def advise(self, remedy: str) -> Problem:
        """Returns the problem with one more remedy."""
        return replace(self, remedy=f"{self.remedy}; {remedy}" if self.remedy else remedy)

    def because(self, reason: str, remedy: str = "") -> Problem:
        """Returns the problem with a reason, a predicate of what `allowed` names, such as "this bert" "has two stacks of blocks"."""
        return replace(self, allowed=f"{self.allowed} {reason}".strip(), remedy=remedy or self.remedy)

    def renamed(self, old: str, new: str) -> Problem:
        """Returns the problem with another text instead of `old` in each part, such as the key under which the user gave a model."""
        return Problem(*(part.replace(old, new) for part in (self.key, self.given, self.allowed, self.remedy)))


class InputError(ValueError):
    """The user's input is wrong. `str(error)` has one line for each of `problems`.

    Args:
        key: Path of the key, or file and line.
        given: Present value or state.
        allowed: Allowed values, or the rule that is broken.
        remedy: Action that mends it.
    """

    def __init__(self, key: str, given: str, allowed: str = "", remedy: str = "") -> None:
        super().__init__(key, given, allowed, remedy)  # an exception is pickled by its arguments
        self.problems: tuple[Problem, ...] = (Problem(key, given, allowed, remedy),)

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """Reports several problems at once: at least one. After the first 50 the others are only counted."""
        every = tuple(problems)
        first = every[0]
        error = cls(first.key, first.given, first.allowed, first.remedy)
        error.problems = every[:MOST_PROBLEMS]
        if len(every) > MOST_PROBLEMS:
            error.problems += (Problem("", f"and {len(every) - MOST_PROBLEMS} more problems", remedy="correct these first"),)
        return error

    @property
    def lines(self) -> tuple[str, ...]:
        """The problems as a user reads them: one line each."""
        return tuple(map(str, self.problems))

    def __str__(self) -> str:
        return "\n".join(self.lines)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest allowed word, or an empty string if none is close."""
    if len(given) > COMPARED_CHARACTERS:
        return ""
    words = [word for word in islice(allowed, COMPARED_NAMES) if len(word) <= 2 * COMPARED_CHARACTERS]
    close = difflib.get_close_matches(given, words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _line(problem: str) -> str:
    """Returns a problem as one line of bounded length that every terminal and log file can show."""
    if len(problem) > LONGEST_PROBLEM:
        problem = f"{problem[: LONGEST_PROBLEM * 3 // 4]} ... {problem[-LONGEST_PROBLEM // 4 :]}"
    line = " ".join(problem.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
