"""What every refusal has in common."""

from __future__ import annotations

import re

from foundation.core.errors import LONGEST_PROBLEM, InputError

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def one_line(error: InputError, *named: str, most: int = 3) -> None:
    """Checks that an error is a few readable lines, one of which names the thing.

    Args:
        error: The error.
        named: Words that have to occur in a line together.
        most: The largest number of lines.
    """
    assert 1 <= len(error.lines) <= most, error.lines
    for problem in error.lines:
        assert problem.isprintable(), problem
        assert len(problem) <= LONGEST_PROBLEM + 100, len(problem)
        assert not ADDRESS.search(problem), problem
        assert "Traceback" not in problem
    assert any(all(word in problem for word in named) for problem in error.lines), (named, error.lines)
