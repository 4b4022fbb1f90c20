"""The exception for wrong user input: recipe, model folder, data, image or request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MOST_PROBLEMS = 50
LONGEST_PROBLEM = 2000
COMPARED_NAMES = 1000
COMPARED_CHARACTERS = 64
"""Names that are compared for a suggestion, and their length: the comparison takes quadratic time."""


class InputError(ValueError):
    """The user's input is wrong. Reports all problems at once, one line each.

    Args:
        problems: One complete sentence each, without line breaks: where (key path, or file and line), what was given, what is
            allowed, what to do. Long ones lose their middle, and after the first 50 the others are only counted.
    """

    def __init__(self, *problems: str) -> None:
        lines = [_line(problem) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            lines.append(f"and {len(problems) - MOST_PROBLEMS} more problems; correct these first")
        super().__init__("\n".join(lines))
        self.problems = tuple(lines)


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
