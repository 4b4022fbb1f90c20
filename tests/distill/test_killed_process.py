"""SIGKILL of one of several processes at a random moment: the others end, one line says so, and the same command goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.distill.processes import RECIPE as BEGINNING

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (
    BEGINNING
    + """
  - finetune: {epochs: 3, learning_rate: 1.0e-3}
"""
)
OFTEN = "from compress.training.train import TrainConfig; TrainConfig.model_fields['checkpoint_seconds'].default = 0.0; " + (
    "TrainConfig.model_rebuild(force=True); from cli import app; app()"
)


def launched(recipe: Path, out: Path, cache: Path) -> subprocess.Popen[str]:
    """Starts a run of two processes that saves its training after every step."""
    script = recipe.with_name("often.py")
    script.write_text(OFTEN.replace("; ", "\n"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, str(script), "run", str(recipe), "--out", str(out), "--processes", "2"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "ddp, pipeline: 2"])
def test_the_same_command_goes_on_to_equal_bits(strategy: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("STRATEGY", strategy))
    whole = launched(recipe, tmp_path / "whole", tmp_path / "cache")
    _, told = whole.communicate(timeout=300)
    assert whole.returncode in (0, 3), told[-2000:]
    draw, killed = random.Random(f"{strategy} kills"), 0
    saved = tmp_path / "killed" / "stages"
    for attempt in range(3):  # at a moment of its own each time
        run = launched(recipe, tmp_path / "killed", tmp_path / "cache")
        deadline = time.monotonic() + 200
        before = {path: path.stat().st_mtime_ns for path in saved.glob(".*/training/state.json")}
        while time.monotonic() < deadline and run.poll() is None:
            found = {path: path.stat().st_mtime_ns for path in saved.glob(".*/training/state.json") if path.exists()}
            if found and found != before:
                break
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        ranks = [child for child in psutil.Process(run.pid).children() if "RANK" in child.environ()]
        victim = draw.randrange(len(ranks))
        rank = int(ranks[victim].environ()["RANK"])
        os.kill(ranks[victim].pid, signal.SIGKILL)
        _, told = run.communicate(timeout=100)
        killed += 1
        assert run.returncode == 128 + signal.SIGKILL, told[-2000:]
        assert told.count(f"process {rank} of 2 was ended by SIGKILL") == 1
        assert "error" not in told, (attempt, told[-2000:])
    last = launched(recipe, tmp_path / "killed", tmp_path / "cache")
    _, told = last.communicate(timeout=300)
    assert last.returncode in (0, 3), told[-2000:]
    assert killed == 3
    assert "resumed after step" in told
    weights = [next((tmp_path / name / "stages").glob("finetune-*/model.safetensors")) for name in ("whole", "killed")]
    one, other = map(load_file, weights)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
