"""Expected problems of the user's input: the key, and the names and figures that the line about it has to hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from foundation.core.errors import InputError, Problem


@contextmanager
def raises_problem(key: str, *parts: str) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expects an `InputError` with a problem under `key` that holds all `parts`.

    Args:
        key: Whole key, or its end: `finetune.loss` is the end of `stages.finetune.loss`, and a file name that of its path.
        parts: Names, figures and remedies in the order of the line, each a whole word or number: `3` is not in `13`, `3.5` or `r3`.
    """
    with pytest.raises(InputError) as caught:
        yield caught
    if not any(_is(problem, key, parts) for problem in caught.value.problems):
        raise AssertionError(f"expected {key!r} with {parts}, not {caught.value.problems}") from caught.value


def _is(problem: Problem, key: str, parts: tuple[str, ...]) -> bool:
    """Returns whether the key ends in `key`, and `given`, `allowed` and `remedy` hold the parts in this order."""
    text = "; ".join(part for part in (problem.given, problem.allowed, problem.remedy) if part)
    in_order = ".*".join(_whole(part) for part in parts)
    return re.search(rf"(?<!\w){re.escape(key)}$", problem.key) is not None and re.search(in_order, text, re.DOTALL) is not None


def _whole(part: str) -> str:
    return rf"(?<!\w)(?<!\d\.){re.escape(part)}(?!\w)(?!\.\d)"
