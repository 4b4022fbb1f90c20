"""A whole run of a model of vectors on our kernels, in the interpreter: the gate on every layer, the evaluation, and the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.pipeline import run
from compress.recipe import check
from foundation.core.progress import ConsoleProgress
from tests import tiny_embedding, without_clocks

pytest.importorskip("triton")  # the extra `kernels`, which `dev` includes
TARGET = {"engines": ["torch_kernels", "onnxruntime"], "batch_sizes": [1, 4], "sequence_lengths": [8], "threads": 1}
STAGES = [{"quantize": {"calibration": {"rows": 16}}}, {"export": {"float_precision": "fp32"}}, {"triton_repo": {"serve": False}}]


MODELS = {
    "bert": (lambda folder: tiny_embedding.folder(folder, 2), tiny_embedding.WIDTH, 12),
    "t5": (tiny_embedding.t5_folder, 24, 12),
    "gated t5": (lambda folder: tiny_embedding.t5_folder(folder, gated=True, layers=1), 24, 7),
}
"""Writes the model; numbers of its vectors; layers in int8."""


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", MODELS)
def test_a_run_gates_evaluates_and_writes_the_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    make, width, layers = MODELS[name]
    model, data = make(tmp_path / "source"), tiny_embedding.pairs(tmp_path / "data", train=24, test=3)
    recipe = check({**tiny_embedding.recipe("tiny", model, data), "target": TARGET, "stages": STAGES})
    outcome = run(recipe, tmp_path / "run", progress=ConsoleProgress("quiet"))
    stages = tmp_path / "run" / "stages"
    builds = json.loads(next(stages.glob("export-*/export.json")).read_text())["builds"]
    entry = next(one for one in builds[-1]["engines"] if one["engine"] == "torch_kernels")
    assert (entry["runnable"], entry["parity"]["passed"]) == (True, True), entry["reason"]
    assert len(entry["parity"]["layers"]) == layers
    assert outcome.report["variants"][-1]["accuracy"]["torch_kernels"]["n"] == 3
    (folder,) = stages.glob("triton_repo-*/model_repository_kernels/quantize-int8")
    config = (folder / "config.pbtxt").read_text()
    assert 'name: "VECTOR"' in config
    assert f"dims: {width}" in config
    assert (folder / "1" / "plan.safetensors").stat().st_size > 0
