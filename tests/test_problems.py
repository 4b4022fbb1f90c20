"""An expected problem is missed if its key, a figure, a name, their order or the remedy differs."""

from __future__ import annotations

import pytest

from foundation.core.errors import InputError, Problem
from tests.problems import raises_problem

PROBLEM = Problem("stages.prune.divisible_by", "3 given", "block 0 has 8 head groups", "give 2 or 4")


def expects(key: str, *parts: str) -> None:
    with raises_problem(key, *parts):
        raise InputError.of([Problem("data.path", "nothing"), PROBLEM])


@pytest.mark.parametrize("key", ["stages.prune.divisible_by", "prune.divisible_by", "divisible_by"])
@pytest.mark.parametrize("parts", [(), ("3",), ("3 given", "block 0", "8 head groups", "give 2 or 4"), ("0", "8", "2", "4")])
def test_the_end_of_the_key_and_parts_in_their_order(key: str, parts: tuple[str, ...]) -> None:
    expects(key, *parts)


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("data.path", ("3",)),  # the key of another problem
        ("prune.divisible", ("3",)),
        ("by", ("3",)),
        ("divisible_by", ("8", "3")),
        ("divisible_by", ("13",)),
        ("divisible_by", ("3", "8 head group")),
        ("divisible_by", ("3", "give 2 or 4", "or raise it")),
    ],
)
def test_other_keys_figures_orders_and_remedies_are_missed(key: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match=r"expected .* not .*divisible_by"):
        expects(key, *parts)


@pytest.mark.parametrize("given", ["13 given", "3.5 given", "0.3 given", "r3 given", "33 given"])
def test_a_figure_is_no_piece_of_another_one(given: str) -> None:
    with pytest.raises(AssertionError), raises_problem("x", "3"):
        raise InputError("x", given)


def test_no_error_and_another_error_are_missed() -> None:
    with pytest.raises(pytest.fail.Exception), raises_problem("x", "3"):
        pass
    with pytest.raises(ValueError, match="3 given"), raises_problem("x", "3"):
        raise ValueError("x: 3 given")
