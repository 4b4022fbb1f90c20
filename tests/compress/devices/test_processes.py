"""What a training takes on each device, against the tensors of two processes that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compress.devices.training_processes import CASES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_each_process_holds_what_the_plan_says(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "compress" / "devices" / "training_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == CASES.keys()
        for name, (measured, predicted) in found.items():
            assert predicted == pytest.approx(measured, rel=0.08), (name, rank)
