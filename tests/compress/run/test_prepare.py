"""What is found before the first stage runs: a GPU, an engine or a library that this machine lacks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.commands.plan import describe
from compress.pipeline import run
from compress.recipe import check
from compress.run import implicit
from compress.run.prepare import prepare
from export.engines import onnxruntime, registry
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.schemes import int8
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole


def recipe(stages: list[Any], **target: Any) -> Any:
    return check(tiny_vit("tiny") | {"target": target, "stages": [{"finetune": {"epochs": 1}}, *stages]})


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(implicit.Source, "run", lambda *arguments: pytest.fail("a stage ran"))


@pytest.mark.parametrize("stages", [["export"], [{"prune": {"measure": "latency", "sparsity": 0.5}}]], ids=["export", "prune to a latency"])
def test_a_gpu_that_is_not_there(stages: list[Any], tmp_path: Path) -> None:
    with raises_problem("target.device", "cuda", "no NVIDIA GPU", "give device: cpu"):
        run(recipe(stages, device="cuda", engines=["torch"]), tmp_path, progress=ConsoleProgress("silent"))


def test_engines_that_do_not_fit_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with raises_problem("target.engines", "openvino", "target.device cuda", "cpu"):
        run(recipe(["export"], device="cuda", engines=["openvino"]), tmp_path, progress=ConsoleProgress("silent"))


def test_a_build_of_onnx_runtime_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(onnxruntime.onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    [problem] = registry.absent(Target(device="cuda", engines=("onnxruntime",)))
    assert "pip install onnxruntime-gpu" in str(problem)
    assert registry.absent(Target(engines=("onnxruntime",))) == []


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.engine_module

    def missing(engine: str) -> Any:
        if engine == "openvino":
            raise ImportError("No module named 'openvino'")
        return known(engine)

    monkeypatch.setattr(registry, "engine_module", missing)
    with raises_problem("target.engines", "openvino", "No module named 'openvino'", "install it"):
        run(recipe(["export"]), tmp_path, progress=ConsoleProgress("silent"))


def test_triton_needs_an_engine_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("export.engines.tensorrt.installed", lambda module: False)
    asked = recipe(["export", {"triton_repo": {"serve": False}}], device="cuda", engines=["tensorrt"])
    assert registry.absent(asked.target) == []
    with raises_problem("target.engines", "tensorrt", "triton_repo needs predictions"):
        run(asked, tmp_path, progress=ConsoleProgress("silent"))


def test_a_stage_after_a_student_that_is_no_text_model_is_checked(tmp_path: Path) -> None:
    stages = [
        {"distill": {"student": {"config": {"num_hidden_layers": 1}}, "epochs": 1}},
        {"prune": {"sparsity": 0.3, "granularity": ["ffn"], "multiple_of": 8, "recover": None}},
    ]
    assert prepare(recipe(stages), tmp_path, ConsoleProgress("silent")).count_macs() > 0


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("vnni", "engines", "attention", "doubted"),
    [
        (False, ["openvino", "onnxruntime"], True, True),
        (False, ["openvino"], "auto", True),
        (True, ["openvino"], True, False),
        (False, ["onnxruntime"], True, False),
        (False, ["openvino"], False, False),
    ],
)
def test_a_plan_notes_int8_products_that_the_processor_saturates(
    vnni: bool, engines: list[str], attention: Any, doubted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "has_vnni", lambda: vnni)
    plan = describe(recipe([{"quantize": {"attention": attention}}, "export"], engines=engines), tmp_path)
    assert any("stages.quantize.attention" in line and "VNNI" in line for line in plan.splitlines()) is doubted
