"""What is wrong with the input: parts, the line that a user reads, several at once, and through a pickle."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.core.errors import LONGEST_PROBLEM, MOST_PROBLEMS, InputError, Problem

PARTS = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (("a.b", "4 given"), "a.b: 4 given"),
        (("a.b", "4 given", "1 to 3 is allowed"), "a.b: 4 given; 1 to 3 is allowed"),
        (("a.b", "4 given", "", "leave it out"), "a.b: 4 given; leave it out"),
        (("a.b", "4 given", "1 to 3 is allowed", "leave it out"), "a.b: 4 given; 1 to 3 is allowed: leave it out"),
        (("a.b", "c given", "allowed: d, e", "add it"), "a.b: c given; allowed: d, e; add it"),
        (("a.b", "c given", "d is allowed; did you mean 'd'?", "add it"), "a.b: c given; d is allowed; did you mean 'd'?; add it"),
        (("a.b", "", "", "give one"), "a.b: give one"),
        (("", "no rows", "", "give one"), "no rows; give one"),
    ],
)
def test_line(parts: tuple[str, ...], line: str) -> None:
    assert str(Problem(*parts)) == line
    assert str(InputError(*parts)) == line


@given(PARTS, PARTS, PARTS, PARTS)
def test_every_part_is_in_one_printable_line(key: str, given_: str, allowed: str, remedy: str) -> None:
    line = str(Problem(key, given_, allowed, remedy))
    assert line.isprintable()
    assert all(" ".join(part.split()) in line for part in (key, given_, allowed, remedy) if part.isprintable())


def test_a_long_line_keeps_its_ends() -> None:
    line = str(Problem("first", "x" * 10 * LONGEST_PROBLEM, remedy="last"))
    assert len(line) < 1.1 * LONGEST_PROBLEM
    assert line.startswith("first: x")
    assert line.endswith("last")


def test_changes_of_a_problem() -> None:
    problem = Problem("model.path", "m of model.path", "this m", "leave m out")
    assert problem.within("f.yaml").key == "f.yaml: model.path"
    assert problem.advise("or not").remedy == "leave m out; or not"
    assert Problem("a", "b").advise("c").remedy == "c"
    assert problem.because("is small", "give a large one") == Problem(
        "model.path", "m of model.path", "this m is small", "give a large one"
    )
    assert problem.renamed("model.path", "x") == Problem("x", "m of x", "this m", "leave m out")


def test_several_at_once_and_the_rest_is_counted() -> None:
    problems = [Problem(f"k{number}", "given") for number in range(MOST_PROBLEMS + 7)]
    error = InputError.of(problems)
    assert error.problems[:MOST_PROBLEMS] == tuple(problems[:MOST_PROBLEMS])
    assert len(error.lines) == MOST_PROBLEMS + 1
    assert "7" in error.lines[-1]
    assert str(error) == "\n".join(error.lines)
    assert InputError.of(iter(problems[:MOST_PROBLEMS])).problems == tuple(problems[:MOST_PROBLEMS])


def test_another_process_reads_the_same() -> None:
    error = InputError.of([Problem("a", "1 given", "2 is allowed", "give 2"), Problem("b", "")])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.problems, str(again)) == (InputError, error.problems, str(error))
