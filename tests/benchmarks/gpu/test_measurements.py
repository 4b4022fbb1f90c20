"""What `make gpu-check` measures of kernels: answers in the interpreter, right and spoilt; shares and ratios with a clock wound by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import figures, measurements
from benchmarks.gpu.cases import META, SMALL, Bound, Case, Maker, fifth_case, gemm_case, sparse_case
from benchmarks.gpu.measurements import checked, differs, fastest, pairs_of_layers, share_of, shares, sparse
from benchmarks.gpu.peaks import GPUS
from export.fused.tuning import CANDIDATES
from export.kernels.block_sparse import SIDES
from export.kernels.epilogue import Output
from export.kernels.launch import Cost, Launch
from tests.benchmarks.gpu.test_timing import Queue

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_kernel_answers_within_its_bound(tmp_path: Path) -> None:
    """The process that `make gpu-check` starts, without a GPU."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    file = tmp_path / "checked.json"
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.figures", str(file), "--check"], env=variables, check=True)
    rows = json.loads(file.read_text())["checked"]
    assert [row["kernel"] for row in rows] == list(SMALL)
    assert [row for row in rows if not row["passed"]] == []


def spoilt_gemm(make: Maker) -> Case:
    case = gemm_case(make, 20, 70, 96, Output())
    case.launch.arguments["inputs"] = 95  # one product less
    return case


def spoilt_codes(make: Maker) -> Case:
    case = SMALL["quantize per tensor"](make)
    case.launch.arguments["scale"] = 0.101
    return case


def spoilt_scale(make: Maker) -> Case:
    case = SMALL["residual + LayerNorm + quantize"](make)
    case.launch.arguments["eps"] = 1e-2
    return case


def silent(make: Maker) -> Case:
    case = SMALL["int8 QKV"](make)
    case.launch.arguments["rows"] = 1
    return case


def broken(make: Maker) -> Case:
    raise RuntimeError("CUDA error:\n  an illegal memory access")


def test_wrong_answers_are_found_and_told(interpreted: Interpreted) -> None:
    rows = interpreted(checked, "cpu", {"a": spoilt_gemm, "b": spoilt_codes, "c": spoilt_scale, "d": silent})
    assert [row["passed"] for row in rows] == [False] * 4
    assert all("outputs are beyond the bound, by up to" in row["reason"] for row in rows)


def test_bounds_are_kept_to_the_step() -> None:
    case = Case(gemm_case(META, 16, 32, 32, Output()).launch, (), tuple, Bound(0.5, 0.25, 1))
    one = torch.tensor([1.0, 2.0])
    assert differs(one, torch.tensor([1.0, 2.0]), case) is None
    assert differs(torch.tensor([1.0, 1.75]), torch.tensor([1.0, 1.0]), case) is None
    assert differs(torch.tensor([1.0, 1.76]), torch.tensor([1.0, 1.0]), case) == (
        "1 of 2 float32 outputs are beyond the bound, by up to 0.76"
    )
    assert differs(torch.tensor([float("nan")]), torch.tensor([1.0]), case) is not None
    codes = torch.tensor([5, -128], dtype=torch.int8)
    assert differs(codes, torch.tensor([6, -127], dtype=torch.int8), case) is None
    assert differs(codes, torch.tensor([7, -128], dtype=torch.int8), case) == "1 of 2 int8 outputs are beyond the bound, by up to 2"


def test_a_share_is_of_the_published_peak_else_of_the_measured_one() -> None:
    launch = Launch(None, (1,), {}, Cost(1000, 10**9, "int8"))
    found = share_of(launch, 0.001, GPUS[90], 5e14)  # 10^9 operations in a microsecond: 10^15 a second
    assert found == {"unit": "int8", "ms": 0.001, "tera_per_s": 1000.0, "share": 0.5053, "floor_share": 0.5053}
    assert share_of(launch, 0.001, None, 2e15)["share"] == 0.5
    assert share_of(launch, 0.001, None, 2e15)["floor_share"] is None
    half = Launch(None, (1,), {}, Cost(1000, 10**9, "fp16"))
    assert share_of(half, 0.001, None, 2e15)["share"] is None


class Played:
    """Launches that take a time on the queue instead of running; `None` has no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queue: Queue, ms: Callable[[Launch], float | None]) -> None:
        def run(launch: Launch) -> None:
            time = ms(launch)
            if time is None:
                raise measurements.TritonError("out of resource: shared memory")
            queue.work(launch.kernel.__name__, time)()

        monkeypatch.setattr(Launch, "run", run)


def test_the_fastest_tile_that_fits_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    first, second, third = CANDIDATES[:3]
    times = {(first.rows, first.outputs): None, (second.rows, second.outputs): 0.2}
    Played(monkeypatch, queue, lambda launch: times.get((launch.arguments["TILE_N"], launch.arguments["TILE_O"]), 0.5))
    launch, tile = fastest(gemm_case(META, 4096, 1024, 1024, Output()), queue)
    assert tile == f"{second.rows} x {second.outputs} x {second.inputs}"
    assert launch.arguments["TILE_N"] == second.rows
    assert third.rows != second.rows
    untiled = SMALL["int8 QKV"](META)
    assert fastest(untiled, queue) == (untiled.launch, None)
    Played(monkeypatch, queue, lambda launch: None)
    with pytest.raises(RuntimeError, match="no tile runs on this GPU"):
        fastest(gemm_case(META, 4096, 1024, 1024, Output()), queue)


def test_a_kernel_that_fails_is_told_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    Played(monkeypatch, queue, lambda launch: 0.1)
    first, second = shares({"broken": broken, "int8 QKV": SMALL["int8 QKV"]}, "meta", queue, GPUS[90], 1e15)
    assert first["reason"] == "RuntimeError: CUDA error: an illegal memory access"
    assert (first["ms"], first["share"]) == (None, None)
    assert (second["ms"], second["reason"]) == (0.1, None)
    assert first.keys() == second.keys()


def test_dense_and_block_sparse_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    Played(monkeypatch, queue, lambda launch: 0.3 if "sparse" not in launch.kernel.__name__ else 0.1)
    layers = {(96, 64, 32): (lambda make: gemm_case(make, 16, 96, 64, Output()), lambda make: sparse_case(make, 16, 96, 64, 32, 2))}
    [row] = sparse("meta", queue, GPUS[90], layers)
    assert (row["outputs"], row["inputs"], row["side"]) == (96, 64, 32)
    assert row["speedup"] == pytest.approx(3.0, rel=1e-3)
    assert row["allowed"] > 0
    names = [name for at, name in enumerate(queue.order) if at == 0 or queue.order[at - 1] != name]
    assert names[-4:] == ["int8_gemm_kernel", "block_sparse_gemm_kernel"] * 2
    [failed] = sparse("meta", queue, None, {(1, 1, 32): (broken, broken)})
    assert failed["reason"] == "RuntimeError: CUDA error: an illegal memory access"
    assert failed.keys() == row.keys()


def test_the_layers_that_are_held_against_dense_ones_have_a_fifth_of_their_blocks() -> None:
    from benchmarks.gpu.kernel_verdicts import SPARSE_SHAPE, SPARSE_SIDES

    pairs = pairs_of_layers()
    assert set(pairs) >= {(*SPARSE_SHAPE, side) for side in SPARSE_SIDES}
    assert {side for _, _, side in pairs} == set(SIDES)
    for (outputs, inputs, side), (dense, few) in pairs.items():
        whole, blocks = dense(META).launch, few(META).launch
        assert whole.cost.operations == 2 * 4096 * outputs * inputs
        assert blocks.cost.operations / whole.cost.operations == pytest.approx(0.2, abs=1e-3)
        assert blocks.arguments["SIDE"] == side
        assert blocks.arguments["out"].dtype == whole.arguments["out"].dtype
    few = fifth_case(Maker("cpu"), 320, 640, 32)
    assert few.launch.arguments["codes"].shape == (40, 32, 32)


def test_the_peak_is_that_of_a_dense_product() -> None:
    queue = Queue()
    find = torch._int_mm

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        queue.work("int_mm", 2.0)()
        return find(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_int_mm", product)
        assert measurements.int8_peak("cpu", queue, 32) == pytest.approx(2 * 32**3 / 0.002)


def test_the_peak_says_where_it_is_from() -> None:
    assert figures.peak(GPUS[90], 1.5e15) == {"published": 1979, "measured": 1500.0, "source": "data sheet of H100 SXM"}
    assert figures.peak(None, 1.5e15)["published"] is None
    assert figures.peak(None, 1.5e15)["source"] == "torch._int_mm, 8192 x 8192 x 8192, on this GPU"


def test_without_a_gpu_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main([str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.startswith("figures: torch finds no NVIDIA GPU that it can use")
    assert not (tmp_path / "out.json").exists()
