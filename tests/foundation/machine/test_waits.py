"""What threads waited for, from files as the kernel writes them, and from the kernel itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from foundation.machine import waits
from foundation.machine.waits import SPIN_COUNT, ThreadWaits, WaitedShare, bounded_spin

pytestmark = pytest.mark.whole


def write(tasks: Path, waits: dict[str, int]) -> None:
    for thread, nanoseconds in waits.items():
        (tasks / thread).mkdir(exist_ok=True)
        (tasks / thread / "schedstat").write_text(f"123 {nanoseconds} 9\n")


def test_the_sum_over_threads_since_the_last_reading(tmp_path: Path) -> None:
    write(tmp_path, {"10": 5_000_000, "11": 1_000_000})
    threads = ThreadWaits(tmp_path)
    assert threads.waited_ms() == 0
    write(tmp_path, {"10": 7_000_000, "11": 1_500_000, "12": 250_000})  # a thread more
    assert threads.waited_ms() == pytest.approx(2.75)
    assert threads.waited_ms() == 0
    threads.close()


def test_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    assert ThreadWaits(tmp_path / "absent").waited_ms() is None
    (tmp_path / "10").mkdir()
    assert ThreadWaits(tmp_path).waited_ms() is None


def test_the_share_of_the_time_that_processes_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TASKS_OF", f"{tmp_path}/{{}}/task")

    def wrote(process: int, ran: int, waited: int) -> None:
        folder = tmp_path / str(process) / "task" / str(process)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ran} {waited} 9\n")

    wrote(10, 1000, 50)
    wrote(11, 500, 500)
    share = WaitedShare([10, 11, 12])
    assert share.share() is None, "nothing ran"
    wrote(10, 1200, 150)
    wrote(11, 600, 1000)
    assert share.share() == pytest.approx(600 / 900)
    assert WaitedShare([12]).share() is None


def test_two_processes_on_one_core_wait_for_each_other() -> None:
    """Asks the kernel: threads pinned to one core wait about as long as they run."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    rival = subprocess.Popen([sys.executable, "-c", busy])
    try:
        watched = (
            f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nfrom foundation.machine.waits import ThreadWaits\n"
            "waits = ThreadWaits()\nwhile time.process_time() < 0.4: pass\nprint(waits.waited_ms())"
        )
        told = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=True, timeout=120)
    finally:
        rival.kill()
        rival.wait()
    assert float(told.stdout) > 20


def test_the_user_chooses_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert bounded_spin() == {"GOMP_SPINCOUNT": SPIN_COUNT}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert bounded_spin() == {}


def test_a_command_bounds_the_threads_of_its_own_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert CliRunner().invoke(cli.app, ["list", "engines"]).exit_code == 0
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
