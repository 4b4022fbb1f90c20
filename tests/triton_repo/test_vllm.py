"""The repository for vLLM: its files are read by what documents them; nothing of it is run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from tritonclient.grpc import model_config_pb2 as pb

from compress.recipe import check
from export.compressed_tensors import write
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from tests.export.test_compressed_tensors import llama, ours, quantized, theirs
from tests.problems import raises_problem
from tests.told import Told
from triton_repo.config import from_text
from triton_repo.serving import server_of
from triton_repo.triton_repo import TritonRepo
from triton_repo.vllm import NOT_RUN, Vllm, engine_arguments, write_vllm_repository

DOCUMENTED: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "tokenizer": str,
    "dtype": str,
    "kv_cache_dtype": str,
    "seed": int,
    "max_model_len": int,
    "pipeline_parallel_size": int,
    "tensor_parallel_size": int,
    "enable_prefix_caching": bool,
    "gpu_memory_utilization": float,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "disable_log_stats": bool,
    "quantization": str,
    "enforce_eager": bool,
    "trust_remote_code": bool,
}
"""Arguments of `AsyncEngineArgs` that the documentation of vLLM has from 0.7 to 0.14 and in its stable release, with their types."""

CONFIG = transformers.AutoConfig.from_pretrained(llama())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "quantize-compressed-tensors"
    write(Checkpoint(quantized("w4a16")), folder)
    return folder


@pytest.fixture(scope="module")
def repository(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("repository") / "model_repository"
    write_vllm_repository(out, packed, CONFIG, Vllm(tensor_parallel_size=2, max_model_len=200), name="quantize-w4a16", max_batch_size=16)
    return out


def test_triton_reads_the_configuration(repository: Path) -> None:
    config = from_text((repository / "models" / "quantize-w4a16" / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("quantize-w4a16", "vllm", 0)
    assert config.model_transaction_policy.decoupled
    [group] = config.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (pb.ModelInstanceGroup.KIND_MODEL, 1, [])
    assert not config.input  # the backend completes them


def test_vllm_documents_every_argument(repository: Path) -> None:
    arguments = json.loads((repository / "models" / "quantize-w4a16" / "1" / "model.json").read_text())
    assert arguments == {
        "model": "/models/quantize-w4a16/1/checkpoint",
        "max_model_len": 200,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.9,
        "kv_cache_dtype": "auto",
        "max_num_seqs": 16,
    }
    for name, value in arguments.items():
        assert isinstance(value, DOCUMENTED[name]), name


def test_the_path_of_the_model_is_where_the_container_sees_it(repository: Path) -> None:
    arguments = json.loads((repository / "models" / "quantize-w4a16" / "1" / "model.json").read_text())
    [volume] = yaml.safe_load((repository / "compose.yaml").read_text())["services"]["triton"]["volumes"]
    here, there, mode = volume.split(":")
    assert mode == "ro"
    assert arguments["model"].startswith(f"{there}/")
    folder = repository / here / arguments["model"].removeprefix(f"{there}/")
    assert (folder / "config.json").exists()
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"


def test_transformers_reads_the_weights_where_they_lie(repository: Path) -> None:
    found = theirs(repository / "models" / "quantize-w4a16" / "1" / "checkpoint")
    torch.testing.assert_close(found, ours(quantized("w4a16")), atol=1e-4, rtol=1e-4)
    assert found.std() > 0.1


def test_the_container_gets_the_gpus_and_its_ports_stay_on_the_machine(repository: Path) -> None:
    [service] = yaml.safe_load((repository / "compose.yaml").read_text())["services"].values()
    assert service["image"].startswith("nvcr.io/nvidia/tritonserver:${RELEASE:?")
    assert service["image"].endswith("-vllm-python-py3")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert service["shm_size"] == "8gb"
    assert "--model-repository=/models" in service["command"]
    assert sum("model-repository,statistics" in argument for argument in service["command"]) == 2  # HTTP and gRPC


def test_the_readme_says_that_nothing_was_run(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    assert "## What has never been run\n\nNothing of this" in text
    assert "@" not in text
    assert "| `max_model_len` | `200` |" in text


def test_what_the_model_reads_is_the_default_length() -> None:
    found = engine_arguments(CONFIG, Vllm(kv_cache_dtype="fp8", gpu_memory_utilization=0.5), "m", None)
    assert (found["max_model_len"], found["kv_cache_dtype"], found["gpu_memory_utilization"]) == (2048, "fp8", 0.5)
    assert "max_num_seqs" not in found


MIXTURE = transformers.MixtralConfig(num_attention_heads=8, num_local_experts=6, max_position_embeddings=512)


def test_whole_experts_on_each_gpu_are_asked_of_vllm() -> None:
    found = engine_arguments(MIXTURE, Vllm(tensor_parallel_size=2, enable_expert_parallel=True), "m", None)
    assert found["enable_expert_parallel"] is True
    assert "enable_expert_parallel" not in engine_arguments(MIXTURE, Vllm(tensor_parallel_size=2), "m", None)


@pytest.mark.parametrize(
    ("config", "gpus", "problem"),
    [
        (MIXTURE, 4, "true given with tensor_parallel_size: 4; the model has 6 experts: give 2"),
        (MIXTURE, 1, "true given with tensor_parallel_size: 1; the model has 6 experts: give 2"),
        (CONFIG, 2, "true given; the model has no experts: leave it out"),
    ],
)
def test_experts_that_do_not_divide_are_one_line(config: Any, gpus: int, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        engine_arguments(config, Vllm(tensor_parallel_size=gpus, enable_expert_parallel=True), "m", None)
    assert str(caught.value) == f"triton_repo.vllm.enable_expert_parallel: {problem}"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tensor_parallel_size": 3}, "triton_repo.vllm.tensor_parallel_size: 3 given; the model has 4 attention heads: give a divisor"),
        ({"max_model_len": 2049}, "triton_repo.vllm.max_model_len: 2049 given; the model reads 2048 tokens: give at most that"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        engine_arguments(CONFIG, Vllm(**settings), "m", None)
    assert str(caught.value) == line


def exported(root: Path, packed: Path | None) -> Artifact:
    root.mkdir()
    if packed is not None:
        (root / packed.name).symlink_to(packed)
    (root / "export.json").write_text(json.dumps({"builds": [], "compressed_tensors": packed and packed.name}))
    return Artifact(root, {"digest": "0"})


def context(folder: Path, device: str = "cuda") -> Context:
    data: Any = SimpleNamespace(labels=(), evaluation=SimpleNamespace(rows=[]))
    folders = {"baseline": llama(), "quantize": quantized("w4a16")}
    checkpoints = {name: Artifact(made, {"id": name}) for name, made in folders.items()}
    return Context("text-generation", data, 16, Target(device=device), 0, Told(), folder, checkpoints=checkpoints)  # type: ignore[arg-type]


def test_the_stage_writes_it_and_says_that_it_was_not_run(tmp_path: Path, packed: Path) -> None:
    (tmp_path / "out").mkdir()
    stage = TritonRepo(vllm=Vllm())
    assert stage.depends(context(tmp_path)) is None  # no server is needed
    stage.run(exported(tmp_path / "export", packed), context(tmp_path), tmp_path / "out")
    [model] = json.loads((tmp_path / "out" / "triton.json").read_text())["models"]
    assert (model["model"], model["engine"], model["precision"]) == ("quantize-w4a16", "vllm", "w4a16")
    assert (model["reason"], model["metrics"], model["latency"]) == (NOT_RUN, {}, [])
    assert "not run" in NOT_RUN
    with pytest.raises(InputError, match=r"repository is for GPUs .* NVIDIA's container"):
        server_of(tmp_path / "out" / "model_repository", tmp_path / "log")


def test_a_model_that_was_not_packed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with raises_problem("stages.triton_repo.vllm", "given", "last variant"):
        TritonRepo(vllm=Vllm()).run(exported(tmp_path / "export", None), context(tmp_path), tmp_path / "out")


BEFORE: list[Any] = [{"quantize": {"scheme": "w4a16"}}, {"export": {}}]


def recipe(task: str = "text-generation", stages: list[Any] | None = None, **target: Any) -> Any:
    quantized = [*BEFORE, {"triton_repo": {"vllm": {}}}]
    return check(
        {
            "name": "x",
            "model": {"path": "owner/model", "task": task},
            "data": {"path": "owner/data"},
            "target": target,
            "stages": quantized if stages is None else stages,
        }
    )


def test_recipes_on_both_devices() -> None:
    assert recipe(device="cuda", engines=["onnxruntime"]).stages[-1].vllm == Vllm()
    assert recipe(device="cpu", engines=["openvino_genai"]).stages[-1].vllm == Vllm()
    kernels: Any = {"device": "cuda", "engines": ["torch_kernels_decoder"]}
    assert recipe(stages=[*BEFORE, {"triton_repo": {"max_waiting": 3}}], **kernels).stages[-1].max_waiting == 3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"task": "text-classification"},
            "stages.triton_repo.vllm: given for the task text-classification; vLLM serves text-generation here",
        ),
        ({"stages": [{"export": {}}, {"triton_repo": {"vllm": {}}}]}, "stages.triton_repo.vllm: given without a quantize stage"),
        (
            {"stages": [{"quantize": {}}, {"export": {}}, {"triton_repo": {"vllm": {"tensor_parallel_size": 0}}}]},
            "greater than or equal to 1",
        ),
        ({"stages": [*BEFORE, {"triton_repo": {"vllm": {"gpus": 2}}}]}, "gpus"),
        (
            {"stages": [*BEFORE, {"triton_repo": {}}], "device": "cuda", "engines": ["onnxruntime"]},
            "it serves text-generation on the cpu, or with torch_kernels_decoder: give target.device: cpu, add torch_kernels_decoder to "
            "target.engines, leave triton_repo out, or write a repository for vLLM with `triton_repo: {vllm: {}}`",
        ),
    ],
)
def test_what_cannot_be_served_is_found_early(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe(**changes)
    assert line in str(caught.value)


def test_a_recipe_without_it_keeps_its_cache_key() -> None:
    assert "vllm" not in TritonRepo().model_dump(mode="json")
    assert TritonRepo(vllm=Vllm()).model_dump(mode="json")["vllm"] == Vllm().model_dump(mode="json")
