"""Processes that are started together: how they end, and what SLURM's variables become."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from compress.commands import launch
from compress.commands.launch import first_host, from_slurm, start
from foundation.core.errors import InputError
from foundation.machine.faults import FailedElsewhere
from foundation.machine.lifeline import WATCHED

ROOT = Path(__file__).resolve().parents[3]
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1234567",
}


def python(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, signal; rank = int(os.environ['RANK']); {text}"]


def test_each_process_is_told_who_it_is(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    assert start(3, python(f"open(rf'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))")) == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [one[:4] for one in told] == [[str(rank), str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({one[4] for one in told}) == 1
    assert all(int(one[5]) >= 1 for one in told)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("sys.exit(3 * (rank == 0))", 3),  # a missed goal
        ("sys.exit([2, 1][rank])", 2),  # wrong input: the first process says so, the other one only that something failed
        ("time.sleep(0.3 * (rank == 0)); sys.exit([2, 1][rank])", 2),
        ("sys.exit(7) if rank else None", 7),
    ],
)
def test_the_status_is_that_of_the_process_that_knows(text: str, status: int) -> None:
    assert start(2, python(text)) == status


def test_a_killed_process_ends_the_others_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    started = time.monotonic()
    assert start(2, python("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(600)")) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 60
    assert capfd.readouterr().err == "process 1 of 2 was ended by SIGKILL\n"


def test_who_lost_a_killed_process_does_not_hide_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The first process may end before it is seen that another one was killed; it then ends with the status of a broken connection."""
    monkeypatch.setattr(launch, "POLL_S", 1.0)
    lost = "assert os.environ['COMPRESS_WATCHED']; time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(1)"
    assert start(2, python(lost)) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "process 1 of 2 was ended by SIGKILL\n"


def test_who_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    monkeypatch.setattr(launch, "STOPPED_S", 0.5)
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1 if rank else 600); sys.exit(5)"
    assert start(2, python(stubborn)) == 5


def test_processes_die_with_the_one_that_started_them(tmp_path: Path) -> None:
    command = python(f"open(rf'{tmp_path}/{{rank}}', 'w').write(str(os.getpid())); time.sleep(600)")
    starts = f"from compress.commands.launch import start; start(2, {command!r})"
    starter = subprocess.Popen([sys.executable, "-c", starts], cwd=ROOT)
    deadline = time.monotonic() + 60
    told = [tmp_path / str(rank) for rank in (0, 1)]
    while time.monotonic() < deadline and not all(path.exists() and path.read_text() for path in told):
        time.sleep(0.02)
    ranks = [psutil.Process(int(path.read_text())) for path in told]
    starter.kill()
    starter.wait()
    left = psutil.wait_procs(ranks, timeout=20)[1]
    for rank in left:
        rank.kill()
    assert left == []


def test_a_step_of_srun_is_understood() -> None:
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07", "MASTER_PORT": str(20000 + 1234567 % 20000)}
    assert from_slurm(STEP) == expected
    assert from_slurm({**STEP, "RANK": "0"}) == {}  # torchrun within a step has said it already
    assert from_slurm({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    batch = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP")} | {"SLURM_NTASKS": "4"}
    assert from_slurm(batch) == {}  # a batch script that calls the command itself
    assert from_slurm(os.environ) == {} or "SLURM_PROCID" in os.environ


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node03", "node03"),
        ("node[03-05,9],other", "node03"),
        ("a,b,c", "a"),
        ("rack1-n[7]", "rack1-n7"),
        ("n[001-128].cluster", "n001.cluster"),
        ("login.example.org", "login.example.org"),
    ],
)
def test_the_first_host_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_list_without_hosts_is_refused() -> None:
    with pytest.raises(InputError, match=r"SLURM_STEP_NODELIST: '\[\]' given"):
        first_host("[]")


@pytest.mark.parametrize(
    ("watched", "first", "raised"), [(True, False, FailedElsewhere), (True, True, InputError), (False, False, InputError)]
)
def test_a_mistake_in_the_recipe_is_reported_once(
    watched: bool, first: bool, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that another launcher uses may hold other files, so that there each process speaks for itself."""
    monkeypatch.setenv(WATCHED, "1") if watched else monkeypatch.delenv(WATCHED, raising=False)

    def read() -> None:
        raise InputError("model", "nothing given")

    with pytest.raises(raised):
        launch.refused_once(read, first)
    assert launch.refused_once(lambda: 3, first) == 3
