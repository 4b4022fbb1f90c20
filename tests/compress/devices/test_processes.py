"""What a training takes on each device, against the tensors of two processes that train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compress.devices.training_processes import CASES, main
from tests.ranks import in_ranks


@pytest.mark.slow
def test_each_process_holds_what_the_plan_says(tmp_path: Path) -> None:
    in_ranks(2, main, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == CASES.keys()
        for name, (measured, predicted) in found.items():
            assert predicted == pytest.approx(measured, rel=0.08), (name, rank)
