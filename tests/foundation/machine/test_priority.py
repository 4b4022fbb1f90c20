"""The threads of a measured process come before other work, and only while it is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from foundation.machine import priority
from foundation.machine.priority import NICE, first



def nices() -> set[int]:
    """Returns the nice values of all threads of this process."""
    return {os.getpriority(os.PRIO_PROCESS, int(one.name)) for one in priority.TASKS.iterdir()}


@pytest.fixture
def waiting() -> threading.Event:
    """A second thread, which waits until the test ends."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    return end


def test_every_thread_is_raised_and_comes_back(waiting: threading.Event) -> None:
    before = nices()
    with first() as nice:
        raised = nices()
    waiting.set()
    if nice != NICE:
        pytest.skip("this system does not let a process go before others")
    assert raised == {NICE}
    assert nices() == before


def test_it_comes_back_after_an_error() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with pytest.raises(ValueError, match="broken"), first():
        raise ValueError("broken")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_refusal_leaves_the_priority_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, thread: int, nice: int) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(os, "setpriority", refuse)
    with first() as nice:
        assert nice == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_that_is_already_first_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpriority", lambda which, thread: -20)
    monkeypatch.setattr(os, "setpriority", lambda *given: pytest.fail("nothing is to be set"))
    with first() as nice:
        assert nice == -20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes user")
def test_an_ordinary_user_is_refused() -> None:
    code = "import os; os.setuid(65534)\nfrom foundation.machine.priority import first\nwith first() as nice: print(nice)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert found.stdout.split() == ["0"]
