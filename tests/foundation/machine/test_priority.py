"""The threads of a measured process come before other work, and only while it is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.machine import priority
from foundation.machine.priority import SWITCH, first


def policies() -> set[int]:
    """Returns the policies of all threads of this process."""
    return {os.sched_getscheduler(int(one.name)) for one in priority.TASKS.iterdir()}


@pytest.fixture
def second_thread() -> Iterator[None]:
    """A second thread, which waits until the test ends."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("second_thread")
def test_every_thread_comes_first_and_goes_back() -> None:
    with first(1) as came_first:
        meanwhile = policies()
    if not came_first:
        pytest.skip("this system does not let a process come before others")
    assert meanwhile == {os.SCHED_RR}
    assert policies() == {os.SCHED_OTHER}


def test_it_goes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), first(1):
        raise ValueError("broken")
    assert policies() == {os.SCHED_OTHER}


def test_a_refusal_leaves_the_policy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, policy: int, param: os.sched_param) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with first(1) as came_first:
        assert came_first is False
        assert policies() == {os.SCHED_OTHER}


def test_it_is_not_asked_for_more_threads_than_cores_or_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setscheduler", lambda *given: pytest.fail("nothing is to be set"))
    with first(len(os.sched_getaffinity(0)) + 1) as came_first:
        assert came_first is False
    monkeypatch.setenv(SWITCH, "0")
    with first(1) as came_first:
        assert came_first is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes user")
def test_an_ordinary_user_is_refused() -> None:
    code = "import os\nfrom foundation.machine.priority import first\nos.setuid(65534)\nwith first(1) as came_first: print(came_first)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert found.stdout.split() == ["False"]
