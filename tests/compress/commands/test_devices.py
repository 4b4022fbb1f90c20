"""`compress plan --devices`: a line for each stage that trains, and how the last model is served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from compress.commands.devices import _placement
from compress.commands.plan import describe
from compress.devices.served import Division
from compress.forecast import PlannedStep
from compress.recipe import check
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from quantize.quantize import Quantize
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole

STAGES: list[Any] = [
    {"finetune": {"epochs": 1}},
    {"prune": {"sparsity": 0.3, "multiple_of": 8, "recover": {"epochs": 1, "distill": True}}},
    {"quantize": {"mode": "ptq"}},
    {"export": {}},
]


def told(stages: list[Any], given: str, streams: int | None = None, layers: int = 1, **more: Any) -> list[str]:
    recipe = check({**tiny_vit("tiny", layers), "target": {"engines": ["onnxruntime"], "batch_sizes": [1, 16]}, "stages": stages, **more})
    lines = describe(recipe, None, given, streams).splitlines()
    return lines[next(index for index, line in enumerate(lines) if line.startswith("devices: ")) :]


def test_each_training_and_the_serving_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = told(STAGES, "2x1GB,nvlink,100GB/s")
    assert lines[0] == "devices: 2 of 1.00 GB (900.0 MB usable each), linked by nvlink"
    assert [line.split(":")[0] for line in lines[1:3]] == ["finetune", "prune"]
    for line in lines[1:3]:
        assert "trains on 2 devices by ddp, " in line
        parts = ("each at the peak: weights", "gradients", "optimizer", "activations")
        assert re.search(", ".join(rf"{part} [\d.]+ kB" for part in parts), line)
    assert lines[3].startswith("serving: batches of 16 rows of ")
    assert lines[4] == "  quantize in int8: 2 replicas of 1 device"
    assert lines[-1].startswith("  a step takes at least 0.00 ms, the time of reading the weights")


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # one row: no smaller micro-batches are tried
    lines = told([{"finetune": {"epochs": 1, "batch_size": 1}}], "1x0.1MB")
    assert lines[1].endswith(": 90.0 kB are not enough, whatever is changed")
    fits = told([{"finetune": {"epochs": 1, "batch_size": 512}}], "1x2MB")
    assert fits[2].startswith("finetune: with micro_batch_size: ")


def test_devices_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--devices: 'eight' given"):
        told(STAGES, "eight")


@pytest.mark.slow
def test_what_several_processes_refuse_is_told_instead_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stages = [{"finetune": {"epochs": 1, "optimizer": {"name": "adafactor"}}}]
    lines = told(stages, "2x1GB", parallel={"strategy": "fsdp2"})
    assert lines[1].startswith(
        "finetune: does not run on 2 devices like this: stages.finetune.optimizer: adafactor given with parallel: {strategy: fsdp2}"
    )
    assert "trains on 2 devices by ddp" in told(stages, "2x1GB")[1]


@pytest.mark.slow
def test_checkpointing_that_is_asked_for_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stages = [{"finetune": {"epochs": 1, "batch_size": 512}}]
    usual, full = (told(stages, "1x1GB", layers=2, **more)[1] for more in ({}, {"parallel": {"checkpointing": "full"}}))
    sizes = [float(re.search(r"activations ([\d.]+) MB", line)[1]) for line in (usual, full)]  # type: ignore[index]
    assert sizes[1] < 0.8 * sizes[0]


def mixture(tmp_path: Path, metrics: dict[str, Any] | None) -> list[str]:
    cached = None if metrics is None else Artifact(tmp_path, {"metrics": metrics})
    config = MixtralConfig(
        architectures=["MixtralForCausalLM"], num_hidden_layers=1, num_local_experts=4, hidden_size=32, intermediate_size=16
    )
    entry = PlannedStep(Quantize(), cached, None, config, (), 0, 0.0)
    return list(_placement(Division(1, tensor=2, experts=2), entry))


def test_the_experts_of_each_device_are_told_where_their_load_is_known(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts"
    summary, layer = mixture(tmp_path, {"experts": {name: [70, 20, 5, 5]}})
    assert "1.50 times the tokens of the mean, 1.80 times in order" in summary
    assert layer == f"    {name}: 0 3 | 1 2"
    for unknown in (None, {}):
        (line,) = mixture(tmp_path, unknown)
        assert "not measured yet" in line
    assert list(_placement(Division(2), PlannedStep(Quantize(), None, None, MixtralConfig(), (), 0, 0.0))) == []


@pytest.mark.parametrize("parallel", [{"mesh": [2, 2]}, {"tensor": 4}])
def test_meshes_that_share_layers_are_compared(parallel: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_vit("tiny", 1)["model"]
    shaped = {**model, "config": {**model["config"], "num_attention_heads": 4, "hidden_size": 16}}
    lines = told([{"finetune": {"epochs": 1, "batch_size": 8}}], "4x1GB,nvlink", model=shaped, parallel=parallel)
    assert "4 devices by " in lines[1]
    assert all(shape in lines[2] for shape in ("1-D of 4 ", "1-D of 4, sequence ", "grid of 2 x 2 ", "2-D of 2 x 2 "))
    assert re.search(r"a step of \d+ tokens", lines[2])
    assert "less than 1-D: grid from " in lines[3]


def test_a_mesh_of_another_size_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = told([{"finetune": {"epochs": 1}}], "8x1GB,nvlink", parallel={"mesh": [2, 2]})
    assert "does not run on 8 devices" in lines[1]
    assert "[2, 4] or [4, 2]" in lines[1]
