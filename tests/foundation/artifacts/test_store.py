"""A store that several runs share: what two of them need at once is made once, and nobody sweeps away what another is making."""

import fcntl
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from compress.pipeline import run
from compress.recipe import check
from foundation.artifacts.store import LOCKS, STAGES, holding, is_shared, share, sweep
from foundation.core.progress import ConsoleProgress
from tests.tiny_recipes import tiny_vit

FORKED = multiprocessing.get_context("fork")
RAW: dict[str, Any] = {**tiny_vit("tiny"), "stages": [{"finetune": {"epochs": 0.5, "learning_rate": 1e-3}}]}


def run_in(folder: Path) -> None:
    run(check(RAW), folder, progress=ConsoleProgress("silent"))


@pytest.mark.slow
@pytest.mark.whole
def test_two_runs_that_need_the_same_steps_make_each_of_them_once(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        share(folder, tmp_path / "store")
        share(folder, tmp_path / "store")  # a second time changes nothing
    workers = [FORKED.Process(target=run_in, args=(folder,)) for folder in folders]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=200)
        assert worker.exitcode == 0
    logs = [(folder / "log.txt").read_text() for folder in folders]
    for step in ("model", "finetune", "evaluate-finetune"):
        assert sum(log.count(f" {step}: running\n") for log in logs) == 1
        assert sum(f" {step}: cached in" in log for log in logs) == 1
    reports = [(folder / "report.json").is_file() for folder in folders]
    assert reports == [True, True]


def test_what_a_living_process_makes_is_not_swept_away(tmp_path: Path) -> None:
    share(tmp_path / "run", tmp_path / "store")
    assert is_shared(tmp_path / "run")
    leftover = tmp_path / "store" / STAGES / ".prune-0123abcd.11112222.tmp"
    leftover.mkdir()
    with (tmp_path / "store" / STAGES / LOCKS / "prune-0123abcd").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path / "run")
        assert leftover.exists()
    sweep(tmp_path / "run")
    assert not leftover.exists()


def test_who_needs_what_another_makes_waits_and_says_so(tmp_path: Path) -> None:
    share(tmp_path / "run", tmp_path / "store")
    told: list[str] = []
    with (tmp_path / "store" / STAGES / LOCKS / "prune-0123abcd").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def log(line: str) -> None:
            told.append(line)
            fcntl.flock(lock, fcntl.LOCK_UN)

        with holding(tmp_path / "run", "prune-0123abcd", log):
            assert told == ["prune-0123abcd: another process is making it; waiting"]
    with holding(tmp_path / "alone", "prune-0123abcd", told.append):  # shares nothing: no lock, no folder
        assert not (tmp_path / "alone").exists()
