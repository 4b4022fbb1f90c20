"""Two machines that train together, and what happens between them. Each case takes a minute or more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import node_failures as cases
from tests.nodes import why_none

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LOST_S, JOIN_S = 20, 8.0


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cases.Setup]:
    if reason := why_none():
        pytest.skip(f"two nodes cannot be made here: {reason}")
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield cases.Setup(folder, lost_s=LOST_S, join_s=JOIN_S, epochs=1)


@pytest.fixture(scope="module")
def whole(setup: cases.Setup) -> Path:
    """The run folder of a training that nothing disturbed."""
    return cases.undisturbed(setup)


@pytest.mark.parametrize("first", [False, True])
def test_a_node_that_is_killed_is_named_and_the_run_goes_on(first: bool, setup: cases.Setup, whole: Path) -> None:
    seen = cases.killed(setup, whole, first)
    ((host, lines),) = seen.lines.items()
    assert host == ("node-b" if first else "node-a")
    assert [f"process {int(not first)} on {'node-a' if first else 'node-b'} is gone" in line for line in lines] == [True]
    assert seen.goes_on
    assert seen.equal


def test_torchrun_waits_for_the_node_and_goes_on(setup: cases.Setup, whole: Path) -> None:
    seen = cases.returned(setup, whole)
    assert any("on node-b is gone" in line for line in seen.lines["node-a"])
    assert seen.goes_on
    assert seen.equal


def test_a_cut_link_ends_both_sides_in_one_line(setup: cases.Setup, whole: Path) -> None:
    seen = cases.cut(setup, whole)
    assert [["process 1 on node-b is gone" in line for line in seen.lines["node-a"]]] == [[True]]
    assert [["process 0 on node-a is gone" in line for line in seen.lines["node-b"]]] == [[True]]
    assert seen.goes_on
    assert seen.equal


def test_a_short_cut_ends_nothing(setup: cases.Setup, whole: Path) -> None:
    seen = cases.blinked(setup, whole)
    assert not any(seen.lines.values())
    assert seen.equal


def test_a_slow_process_is_named_with_its_machine(setup: cases.Setup) -> None:
    assert "process 1 on node-b works" in cases.slow(setup).lines["node-a"][0]


def test_a_stopped_process_is_named_with_its_machine(setup: cases.Setup) -> None:
    assert "process 1 on node-b has not reported" in cases.stopped(setup).lines["node-a"][0]


def test_a_full_disk_is_named_and_the_run_goes_on_after_it(setup: cases.Setup, whole: Path) -> None:
    seen = cases.full(setup, whole)
    assert [line.startswith("process 0 on node-a: ") and "No space left" in line for line in seen.lines["node-a"]] == [True]
    assert seen.lines["node-b"] == []
    assert seen.goes_on
    assert seen.equal


@pytest.mark.parametrize("hours", [5.0, -5.0])
def test_clocks_that_are_hours_apart_change_nothing(hours: float, setup: cases.Setup, whole: Path) -> None:
    seen = cases.apart(setup, whole, 3600 * hours)
    assert not any(seen.lines.values())
    assert seen.equal


@pytest.mark.parametrize("first", [True, False])
def test_a_node_that_never_comes_is_named_and_nothing_is_written(first: bool, setup: cases.Setup) -> None:
    ((_, lines),) = cases.missing(setup, first).lines.items()
    assert len(lines) == 1
    assert ("1 of 2 processes came within 8 s: process 0 on node-a; 1 did not" if first else "process 0 did not come") in lines[0]
