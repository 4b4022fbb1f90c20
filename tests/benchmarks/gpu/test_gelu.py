"""The bench of GELU's methods: the fastest tile of each, what does not run, and errors that are counted and held to a bound."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.errors import TritonError

from benchmarks.gpu import figures
from benchmarks.gpu.cases import META
from benchmarks.gpu.gelu import TILES, errors, probes, times, told
from export.kernels import activation_codes
from export.kernels.gemm import Tile
from export.kernels.launch import Launch
from tests.benchmarks.gpu.test_timing import Queue

Interpreted = Callable[..., Any]
WIDE = Tile(1, 2**16, 16, 4, 1)


def test_every_method_is_timed_in_its_fastest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()

    def run(launch: Launch) -> None:
        arguments = launch.arguments
        if arguments["TILE_O"] == 256:
            raise TritonError("out of resource: shared memory")
        queue.work("", 0.1 if (arguments["METHOD"], arguments["HALVES"]) == ("logistic", True) else 0.2)()

    monkeypatch.setattr(Launch, "run", run)
    rows = times(META, (4096, 3072, 768), ["exact", "logistic"], queue)
    assert [row["method"] for row in rows] == ["no activation, float16", "exact", "logistic"]
    assert [row["ms"] for row in rows] == pytest.approx([0.2, 0.2, 0.1])
    assert rows[2]["tera_per_s"] == pytest.approx(2 * 4096 * 3072 * 768 / 1e8, rel=1e-3)
    assert rows[2]["tile"].endswith("in halves")
    assert all(row["tiles"][told(Tile(128, 256, 128, 8, 3))] is None for row in rows)
    assert all(len(row["tiles"]) == len(TILES) for row in rows)


def test_errors_are_counted_and_held_to_the_bound(interpreted: Interpreted) -> None:
    y = probes("cpu", grid=10_000)
    assert float(y.abs().max()) == 10
    found = interpreted(errors, "gelu", "tanh", 0.1, y, WIDE)
    assert found["within"]
    assert (found["count"], found["steps"]) == (len(y), 1)
    assert 0 < found["off"] < 0.001 * len(y)
    assert 0 < found["tie"] <= found["bound"]
    spoilt = interpreted(with_a_wrong_polynomial, y)
    assert not spoilt["within"]
    assert spoilt["off"] > found["off"]


def with_a_wrong_polynomial(y: torch.Tensor) -> dict[str, Any]:
    """Counts the errors of a method whose first coefficient is off by a tenth."""
    right = activation_codes.C0
    activation_codes.C0 = tl.constexpr(right.value * 1.1)
    try:
        return errors("gelu", "logistic", 0.1, y, WIDE)
    finally:
        activation_codes.C0 = right


def test_the_option_measures_gelu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"shape": "1 x 2 x 3", "method": "logistic", "ms": 0.5, "tera_per_s": 7.0, "tile": "t"}
    error = {
        "activation": "gelu",
        "method": "tanh",
        "scale": 0.1,
        "count": 9,
        "off": 2,
        "steps": 1.0,
        "tie": 0.1,
        "bound": 0.05,
        "within": False,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(figures, "OnGpu", lambda: None)
    monkeypatch.setattr(figures, "gelu_figures", lambda device, gpu: {"times": [row], "errors": [error]})
    assert figures.main([str(tmp_path / "gelu.json"), "--only", "gelu"]) == 0
    assert json.loads((tmp_path / "gelu.json").read_text(encoding="utf-8"))["errors"] == [error]
    printed = capsys.readouterr().out
    assert "500.0 us" in printed
    assert "2 of 9 off, by 1, 0.1 from a tie (0.05 allowed)  BEYOND ITS BOUND" in printed
    assert figures.main([str(tmp_path / "other.json"), "--only", "gelu", "--check"]) == 2
    assert "give one of the two" in capsys.readouterr().err
