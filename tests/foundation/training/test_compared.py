"""Losses that compare rows: several processes come to the sums and gradients of one that has the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.foundation.training import compared_processes

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_come_to_the_gradients_of_the_whole_batch(processes: int, tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "foundation" / "training" / "compared_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", script, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found, expected = torch.load(tmp_path / "found.pt"), compared_processes.whole()
    assert found.keys() == expected.keys()
    something = [name for name in expected if not name.endswith((" 1", "relational of 2"))]  # two rows have one distance, hence its mean
    assert all(float(expected[name]["terms"].sum()) > 0 for name in something)
    for name, whole in expected.items():
        assert found[name].keys() == whole.keys()
        for part, value in whole.items():
            torch.testing.assert_close(
                found[name][part], value, rtol=1e-4, atol=1e-5, msg=lambda told, name=name, part=part: f"{name}, {part}: {told}"
            )
