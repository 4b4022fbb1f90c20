"""Losses that compare rows: several processes come to the sums and gradients of one that has the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.foundation.training.processes import compared_processes
from tests.ranks import in_ranks

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_come_to_the_gradients_of_the_whole_batch(processes: int, tmp_path: Path) -> None:
    in_ranks(processes, compared_processes.together, tmp_path)
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
