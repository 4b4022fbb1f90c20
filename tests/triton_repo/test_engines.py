"""A whole run whose model is served by ONNX Runtime, in the real server."""

import json
from pathlib import Path

import pytest

from compress.pipeline import run
from compress.recipe import check
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside", "no_clocks")]


@pytest.mark.slow
def test_onnx_runtime_serves_what_it_was_evaluated_with(tmp_path: Path) -> None:
    stages = [
        {"finetune": {"epochs": 0.2, "learning_rate": 1e-3}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {"concurrency": [1]}},
    ]
    raw = {**tiny_vit("served"), "target": {"engines": ["onnxruntime"], "batch_sizes": [1]}, "stages": stages}
    report = run(check(raw), tmp_path / "served", progress=ConsoleProgress("quiet")).report
    repository = open_run(tmp_path / "served").of_kind("model_repository")
    assert repository is not None
    told = json.loads((repository.path / "triton.json").read_text())
    assert {model["engine"] for model in told["models"]} == {"onnxruntime"}
    assert all(model["disagreements"] == 0 and model["n"] == 360 for model in told["models"])
    served = report["served"]
    assert told["chosen"] == f"{served['variant']}-{served['precision']}"
    assert served["accuracy"]["triton"]["value"] == served["accuracy"]["onnxruntime"]["value"]
    files = {path.name for path in (repository.path / "model_repository" / "quantize-int8" / "1").iterdir()}
    assert {"model.onnx", "engine.py"} <= files
    assert not any(name.startswith("openvino") for name in files)
