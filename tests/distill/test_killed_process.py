"""SIGKILL of one of several processes at random moments: the others end, one line says so, and the same command goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.distill.processes import RECIPE as BEGINNING

Moment = Literal["before", "writing", "step"]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (
    BEGINNING
    + """
  - finetune: {epochs: 6, learning_rate: 1.0e-3}
"""
)
OFTEN = """
from foundation.training.train import TrainConfig
TrainConfig.model_fields["checkpoint_seconds"].default = 0.0
TrainConfig.model_rebuild(force=True)
from cli import app
app()
"""
MOMENTS: tuple[Moment, ...] = ("before", *("writing", "step", "step") * 3)
"""Of ten kills: before the first checkpoint, while one is written, or between."""


def launched(recipe: Path, out: Path, cache: Path) -> subprocess.Popen[str]:
    """Starts a run of two processes that saves its training after every step."""
    script = recipe.with_name("often.py")
    script.write_text(OFTEN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, str(script), "run", str(recipe), "--out", str(out), "--processes", "2"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(found: Callable[[], object], run: subprocess.Popen[str]) -> None:
    """Waits for something while a run goes on."""
    deadline = time.monotonic() + 300
    while not found():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """Returns the processes that train, in order of rank, as soon as all have begun."""
    found: list[psutil.Process] = []

    def begun() -> bool:
        found[:] = psutil.Process(run.pid).children()
        return len(found) == 2 and all("RANK" in child.environ() for child in found)

    until(begun, run)
    return sorted(found, key=lambda child: child.environ()["RANK"])


def wait_for(moment: Moment, run: subprocess.Popen[str], stages: Path, draw: random.Random) -> None:
    """Waits for a moment of a run that saves its training in a folder of `stages`."""
    if moment == "before":
        time.sleep(draw.uniform(0, 6))
        assert not list(stages.glob(".*/training"))
        return
    for _ in range(draw.randint(1, 4)):
        known = {path: path.stat().st_mtime_ns for path in stages.glob(".*/training")}
        until(lambda known=known: any(path.stat().st_mtime_ns != known.get(path) for path in stages.glob(".*/training")), run)  # type: ignore[misc]
    if moment == "writing":
        until(lambda: any(stages.glob(".*/.training.*.tmp")), run)
    time.sleep(draw.uniform(0, 0.001 if moment == "writing" else 0.1))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("plan", ["strategy: ddp", "strategy: fsdp2", "tensor: 2", "pipeline: 2"])
def test_after_ten_kills_the_same_command_comes_to_equal_bits(plan: str, tmp_path: Path) -> None:
    recipe, stages = tmp_path / "recipe.yaml", tmp_path / "killed" / "stages"
    recipe.write_text(RECIPE.replace("strategy: STRATEGY", plan))
    whole = launched(recipe, tmp_path / "whole", tmp_path / "cache")
    _, told = whole.communicate(timeout=600)
    assert whole.returncode in (0, 3, 4), told[-2000:]
    draw, half_written = random.Random(f"{plan} kills"), 0
    for attempt, moment in enumerate(MOMENTS):
        run = launched(recipe, tmp_path / "killed", tmp_path / "cache")
        ranks = ranks_of(run)
        everything = psutil.Process(run.pid).children(recursive=True)
        wait_for(moment, run, stages, draw)
        rank = 0 if moment == "writing" else draw.randrange(2)  # the first process writes
        ranks[rank].kill()
        _, told = run.communicate(timeout=100)
        half_written += any(stages.glob(".*/.training.*.tmp"))
        assert run.returncode == 128 + signal.SIGKILL, (attempt, told[-2000:])
        assert [line for line in told.splitlines() if "SIGKILL" in line] == [f"process {rank} of 2 was ended by SIGKILL"], (attempt, told)
        assert "rror" not in told, (attempt, told[-2000:])  # neither a message nor a traceback of who lost it
        assert psutil.wait_procs(everything, timeout=20)[1] == [], attempt
        assert not list(stages.glob("finetune-*")), "the run was finished before it was killed"
    last = launched(recipe, tmp_path / "killed", tmp_path / "cache")
    _, told = last.communicate(timeout=600)
    assert last.returncode in (0, 3, 4), told[-2000:]
    assert half_written
    assert "resumed after step" in told
    weights = [next((tmp_path / name / "stages").glob("finetune-*/model.safetensors")) for name in ("whole", "killed")]
    one, other = map(load_file, weights)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
