"""Profiles of trainings: figures against ones counted by hand, and that a training without one does nothing of it."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.report.model.contents import Contents
from compress.report.sections.profile import profiles as section
from foundation.machine.gemm_speed import gemm_speed
from foundation.training import profile
from foundation.training.profile import Profiler, busy, communication, memory_timeline, operations, thinned
from tests.plain_reports import contents, render
from tests.report_keys import undocumented


def profiler(folder: Path, num_steps: int, **changes: Any) -> Profiler:
    usual: dict[str, Any] = {
        "label": "recover 1", "device": torch.device("cpu"), "dtype": torch.float32, "processes": 1, "macs": lambda length: 1000 * length
    }  # fmt: skip
    return Profiler(folder, num_steps=num_steps, **{**usual, **changes})


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_overlapping_intervals_count_once(found: list[tuple[int, int]]) -> None:
    ticks = {tick for start, length in found for tick in range(start, start + length)}
    assert busy([(float(start), float(start + length)) for start, length in found]) == len(ticks)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 15, 16, 40])
def test_every_step_has_one_part_and_one_at_least_is_traced(num_steps: int, tmp_path: Path) -> None:
    warm, timed, traced = profiler(tmp_path, num_steps).parts
    assert min(warm, timed) >= 0
    assert traced >= 1
    assert warm + timed + traced <= num_steps
    assert (warm, timed, traced) == (3, 10, 3) or num_steps < 16


def test_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 2 s within each step: 10 timed steps of rows of 4 and 8 tokens, of 8000 MACs each."""
    clock = iter(float(2 * number) for number in range(1000))
    monkeypatch.setattr(Profiler, "_now", lambda self: next(clock))
    monkeypatch.setattr(profile, "gemm_speed", lambda device, dtype: 2e4)
    made = profiler(tmp_path / "profiles", 20, processes=2)
    for _ in range(20):
        with made.step([4, 8]):
            torch.ones(64, 64) @ torch.ones(64, 64)
    found = json.loads((tmp_path / "profiles" / "recover-1.json").read_text())
    assert found["step_ms"] == 2000.0
    assert (found["rows_per_s"], found["tokens_per_s"], found["padding_share"]) == (1.0, 6.0, 0.25)
    assert found["flops_per_s"] == 6 * 8000 * 2 / 2
    assert found["utilisation"] == pytest.approx(48000 / (2 * 2e4))
    assert found["communication_share"] == 0.0
    assert found["operations"][0]["calls"] >= 3
    assert "aten::mm" in {one["name"] for one in found["operations"]}
    assert found["peak_bytes"] >= 64 * 64 * 4
    assert max(size for _, size in found["memory"]) == found["peak_bytes"]
    with gzip.open(tmp_path / "profiles" / found["trace"], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert len([event for event in events if event.get("name") == "aten::mm"]) == 3


def test_collectives_are_known_by_their_names() -> None:
    names = ["gloo:all_reduce", "nccl:_all_gather_base", "ncclDevKernel_AllReduce_Sum_f32", "aten::mm", "c10d::allreduce_"]
    events = [{"ph": "X", "name": name, "ts": 10 * number, "dur": 4} for number, name in enumerate(names)]
    assert communication([*events, {"ph": "i", "name": "gloo:all_reduce", "ts": 99}]) == [(0, 4), (10, 14), (20, 24), (40, 44)]


def test_a_real_collective_is_found(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        made = profiler(tmp_path, 1, processes=2)
        with made.step([1]):
            dist.all_reduce(torch.ones(1000))
    finally:
        dist.destroy_process_group()
    share = json.loads((tmp_path / "recover-1.json").read_text())["communication_share"]
    assert 0 < share < 1


def test_memory_by_time() -> None:
    def event(at: float, size: int, device: int = 0) -> dict[str, Any]:
        return {"name": "[memory]", "ts": at, "args": {"Device Type": device, "Total Allocated": size}}

    events = [event(3000, 5), event(1000, 7), event(2000, 9, device=1), {"name": "aten::mm", "ts": 0}]
    assert memory_timeline(events, 0) == [(0.0, 7), (2.0, 5)]
    assert memory_timeline(events, 1) == [(0.0, 9)]
    assert memory_timeline([], 0) == []
    line = [(float(at), at % 97) for at in range(1000)]
    assert len(thinned(line)) == 200
    assert max(size for _, size in thinned(line)) == 96
    assert thinned([]) == []


def test_operations_by_their_own_time() -> None:
    averages = [SimpleNamespace(key=f"op{n}", self_cpu_time_total=n, self_device_time_total=20 - n, count=n) for n in range(20)]
    found = operations(averages, on_gpu=False)
    assert [one["name"] for one in found[:2]] == ["op19", "op18"]
    assert found[0] == {"name": "op19", "share": 19 / 190, "calls": 19}
    assert operations(averages, on_gpu=True)[0]["name"] == "op0"
    assert operations([], on_gpu=False) == []


def test_a_step_that_fails_stops_the_trace(tmp_path: Path) -> None:
    for _ in range(2):  # a profiler that was left running would refuse to start again
        made = profiler(tmp_path, 1)
        with pytest.raises(ValueError, match="no"), made.step([1]):
            raise ValueError("no")
    assert not (tmp_path / "recover-1.json").exists()


def test_the_speed_of_a_product_is_positive() -> None:
    assert gemm_speed(torch.device("cpu"), torch.float32) > 1e6


def test_the_report_shows_them(tmp_path: Path) -> None:
    made = profiler(tmp_path, 20, processes=2)
    for _ in range(20):
        with made.step([4, 8]):
            torch.ones(8, 8) @ torch.ones(8, 8)
    found = json.loads((tmp_path / "recover-1.json").read_text())
    report = {"stages": [{"id": "prune", "profiles": [found]}, {"id": "model", "profiles": []}]}
    assert not [path for path in undocumented(report, Contents) if "profiles" in path]
    (view,) = section(contents(report))
    assert view["name"] == "prune: recover 1"
    assert {"Tokens per second", "Model FLOPs utilisation", "Communication", "Peak memory"} <= {key for key, _ in view["rows"]}
    text = render(report)
    assert "Training profiles" in text
    assert "recover-1.trace.json.gz" in text
    assert "Training profiles" not in render({"stages": [{"id": "model", "profiles": []}]})
    empty = dict.fromkeys(found)
    assert section(contents({"stages": [{"id": "prune", "profiles": [empty]}]}))[0]["operations"] == []


@pytest.mark.slow
def test_it_is_not_imported_unless_it_is_asked_for() -> None:
    import subprocess

    code = "import sys, foundation.training.train; sys.exit('foundation.training.profile' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).resolve().parents[3]).returncode == 0
