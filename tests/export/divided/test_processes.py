"""Ranks in processes of their own, connected by gloo: each has the logits of the undivided model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from export.divided.folder import write
from foundation.models.folder import Checkpoint
from tests.export.divided.divided_checkpoints import answers, inputs, quantized

ROOT = Path(__file__).resolve().parents[3]
CASES = {"bert": ["w8a8", "w4a16"], "vit": ["w8a8"], "llama": ["w8a8", "w8a8-dynamic", "w4a16", "w8a16"], "mixtral": ["w8a8"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_have_the_logits_of_the_whole(ranks: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = {}
    for family, schemes in CASES.items():
        for scheme in schemes:
            out = tmp_path / f"{family}-{scheme}"
            write(Checkpoint(quantized(family, scheme)), out, ranks, "export.tensor_parallel")
            torch.save(inputs(family), out / "features.pt")
            expected[out.name] = answers(quantized(family, scheme), inputs(family))
    script = str(Path(__file__).with_name("rank_process.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    for rank in range(ranks):
        found = torch.load(tmp_path / f"logits-{rank}.pt")
        for name, logits in expected.items():
            torch.testing.assert_close(found[name], logits, rtol=0, atol=1e-4)
            if name.endswith("-w8a8"):
                assert torch.equal(found[name], logits), name
