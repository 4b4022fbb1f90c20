"""The exception for wrong user input: recipe, model folder, data, image or request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """The user's input is wrong. Reports all problems at once, one line each.

    Args:
        problems: One complete sentence each, without line breaks: where (key path, or file and line), what was given, what is
            allowed, what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(" ".join(problem.split()) for problem in problems)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest allowed word, or an empty string if none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
