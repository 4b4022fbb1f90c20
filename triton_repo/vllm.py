"""Writes the repository of a language model for NVIDIA GPUs that Triton serves with its vLLM backend.

    out/
      README.md  compose.yaml          the commands, and what has never been run
      models/                          the repository that Triton serves
        NAME/
          config.pbtxt                 backend vllm; vLLM itself takes the GPUs, so the instance is of KIND_MODEL
          1/model.json                 arguments of vLLM's engine (AsyncEngineArgs)
          1/checkpoint/                weights, config and tokenizer, as `export.compressed_tensors` wrote them

The backend starts vLLM with `AsyncEngineArgs(**model.json)`, so an unknown key keeps the model from loading. Only keys are written that
releases from 0.7 on document, and `enable_expert_parallel`, which 0.8 brought, where it is asked for. `disable_log_requests` is none of
them: 0.10.1 took it away, and requests are not logged by default.
Inputs and outputs are completed by the backend.

Left out: LoRA, several nodes, pipeline parallelism, speculative decoding, and a check that vLLM knows the architecture. Nothing of it has
been run: there is neither a GPU nor vLLM where this is written.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from foundation.core.config import Config
from foundation.core.errors import InputError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from tritonclient.grpc import model_config_pb2 as pb

Arguments = dict[str, str | int | float | bool]
"""Arguments of vLLM's engine."""
MODELS, CHECKPOINT, ARGUMENTS, COMPOSE = "models", "checkpoint", "model.json", "compose.yaml"
MOUNT = "/models"
"""Path of `models/` in the container; the backend knows no path relative to the repository."""
BACKEND = "vllm"
NOT_RUN = "not run: written for a machine with GPUs and NVIDIA's image of Triton with vLLM"
SHARED_MEMORY = "8gb"
"""Upper bound of /dev/shm, through which the processes of vLLM and NCCL talk; nothing is reserved."""


class Vllm(Config):
    """Arguments of vLLM's engine; all others keep vLLM's defaults."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that the model is divided among; has to divide its number of attention heads."""
    enable_expert_parallel: bool = False
    """Whether whole experts of a mixture are placed on each GPU, instead of a part of every expert; `tensor_parallel_size` has to divide
    their number. vLLM 0.8 or later."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of prompt and answer together. Default: what the model reads."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Precision of the cache of keys and values. auto: the type that the model computes in; fp8: half of 16 bits, which changes answers."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the memory of each GPU that vLLM takes: for the weights, and the rest for keys and values."""


def write_vllm_repository(
    out: Path, packed: Path, config: PreTrainedConfig, settings: Vllm, *, name: str, max_batch_size: int | None = None
) -> None:
    """Writes the repository.

    Args:
        out: Folder to write into; created.
        packed: A folder of `export.compressed_tensors`.
        config: Transformers config of the model, without the words of that format.
        settings: Arguments of the engine.
        name: Name of the model, which clients call.
        max_batch_size: Most answers that run at once. Default: vLLM's own.

    Raises:
        InputError: The name is not a valid Triton model name, or the settings do not fit the model.
    """
    from triton_repo.config import to_text

    arguments = engine_arguments(config, settings, name, max_batch_size)
    version = out / MODELS / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(to_text(vllm_config(name)), encoding="utf-8")
    (version / ARGUMENTS).write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")
    shutil.copytree(packed, version / CHECKPOINT)
    (out / COMPOSE).write_text(_COMPOSE.format(gpus=settings.tensor_parallel_size, shared=SHARED_MEMORY, mount=MOUNT), encoding="utf-8")
    (out / "README.md").write_text(readme(name, arguments), encoding="utf-8")


def engine_arguments(config: PreTrainedConfig, settings: Vllm, name: str, max_batch_size: int | None) -> Arguments:
    """Returns the contents of model.json.

    Raises:
        InputError: The settings do not fit the model.
    """
    from foundation.models.config import most_tokens, num_experts  # it loads torch, and a server reads this file

    longest, heads, gpus = most_tokens(config), int(config.num_attention_heads), settings.tensor_parallel_size
    problems = []
    if heads % gpus:
        problems.append(Problem("tensor_parallel_size", f"{gpus} given", f"the model has {heads} attention heads", "give a divisor"))
    if settings.enable_expert_parallel:
        experts = num_experts(config)
        if not experts:
            problems.append(Problem("enable_expert_parallel", "true given", "the model has no experts", "leave it out"))
        elif gpus == 1 or experts % gpus:
            fits = " or ".join(str(number) for number in range(2, experts + 1) if experts % number == 0 and heads % number == 0)
            problems.append(
                Problem(
                    "enable_expert_parallel",
                    f"true given with tensor_parallel_size: {gpus}",
                    f"the model has {experts} experts",
                    f"give {fits}",
                )
            )
    if settings.max_model_len is not None and longest is not None and settings.max_model_len > longest:
        problems.append(
            Problem("max_model_len", f"{settings.max_model_len} given", f"the model reads {longest} tokens", "give at most that")
        )
    if problems:
        raise InputError.of(replace(problem, key=f"triton_repo.vllm.{problem.key}") for problem in problems)
    arguments: dict[str, str | int | float | bool | None] = {
        "model": f"{MOUNT}/{name}/1/{CHECKPOINT}",
        "max_model_len": settings.max_model_len or longest,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel or None,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "max_num_seqs": max_batch_size,
    }
    return {key: value for key, value in arguments.items() if value is not None}


def vllm_config(name: str) -> pb.ModelConfig:
    """Returns the `ModelConfig` message.

    Raises:
        InputError: The name is not a valid Triton model name.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    from triton_repo.config import check_name

    check_name(name)
    config = pb.ModelConfig(name=name, backend=BACKEND, max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_MODEL, count=1)
    return config


def readme(name: str, arguments: Arguments) -> str:
    """Returns the README of the repository."""
    rows = "\n".join(f"| `{key}` | `{json.dumps(value)}` |" for key, value in arguments.items())
    return _README.replace("@NAME@", name).replace("@ROWS@", rows)


_COMPOSE = """\
# docker compose up; RELEASE is one of NVIDIA's images, such as 26.07, and KEY any secret: see README.md
services:
  triton:
    image: nvcr.io/nvidia/tritonserver:${{RELEASE:?a release of the images, YY.MM}}-vllm-python-py3
    command:
      - tritonserver
      - --model-repository={mount}
      - --http-restricted-api=shared-memory,model-repository,statistics,trace,logging,admin-key=${{KEY:?any secret}}
      - --grpc-restricted-protocol=shared-memory,model-repository,statistics,trace,logging,admin-key=${{KEY:?any secret}}
    environment:
      HF_HUB_OFFLINE: "1"
      VLLM_NO_USAGE_STATS: "1"
    volumes:
      - ./models:{mount}:ro
    ports:
      - 127.0.0.1:8000:8000
      - 127.0.0.1:8001:8001
      - 127.0.0.1:8002:8002
    shm_size: {shared}
    ulimits:
      memlock: -1
      stack: 67108864
    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              count: {gpus}
              capabilities: [gpu]
"""

_README = """# @NAME@ for Triton with vLLM on NVIDIA GPUs

## On the machine that serves

    export RELEASE=YY.MM                                # a release of NVIDIA's images; it holds Triton and a vLLM that fit each other
    export KEY=$(head -c 32 /dev/urandom | base64 | tr -dc A-Za-z0-9)
    docker compose up

Ports are bound to the machine itself. Nothing stands before Triton: put something there that authenticates, and never publish its ports to
a network that you do not trust.

    curl -s localhost:8000/v2/models/@NAME@/generate -d \\
        '{"text_input": "Once upon a time", "parameters": {"stream": false, "temperature": 0, "max_tokens": 40}}'

`generate_stream` and gRPC stream the answer. Inputs: `text_input`, `stream`, `exclude_input_in_output`, and `sampling_parameters`, vLLM's
as JSON. Outputs: `text_output`, and others on request. They belong to the vLLM backend, and differ from the repository for CPUs.

`models/@NAME@/1/model.json` holds the arguments of vLLM's engine. Other keys of its `AsyncEngineArgs` may be added; an unknown one keeps
the model from loading. The path in `model` is right where the folder `models` is mounted at `/models`.

| argument | value |
|---|---|
@ROWS@

## What has never been run

Nothing of this: no command above, no line of compose.yaml, and not the model in vLLM. The machine that wrote this repository had no GPU, no
container and no vLLM. What is known: config.pbtxt is written by Triton's own protobuf, the keys of model.json are among those that vLLM
documents, and in the tests of this project Transformers reads weights of this format with the logits of the quantized checkpoint. Speed,
memory and answers on a GPU are not known. Compare some answers with `compress generate` before you trust it.
"""
