"""The model of one rank, from its folder (`export.divided.folder`). A server of ranks gets a copy of this file and of what it imports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from export.divided.dealt_experts import hold, with_dealt_experts
from export.divided.ranks import Ranks
from export.divided.row_linear import with_rows
from foundation.core.errors import InputError
from foundation.models.architecture.shapes import auto_class
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.experts import with_separate_experts
from foundation.models.library import one_line, quiet, task_of, with_class
from foundation.models.tied import apart
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.scales import Scales
from foundation.schemes.sites import apply_sites

WEIGHTS, DIVISION = "rank.safetensors", "division.json"
SCHEMA = 2
"""Version of division.json."""


@dataclass(frozen=True)
class Division:
    """Contents of division.json."""

    rank: int
    """This rank, from 0."""
    ranks: int
    """Number of ranks."""
    rows: tuple[str, ...]
    """Names of the layers that are divided along their inputs, after which the ranks add up."""
    whole_experts: bool = False
    """Whether the experts of a mixture are dealt out."""
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The experts that this rank holds by layer of experts, where they are dealt out."""


def folder_of(out: Path, rank: int, ranks: int) -> Path:
    """Returns the folder of one rank."""
    return out / f"rank-{rank}-of-{ranks}"


def load(folder: Path, ranks: Ranks, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Loads the model of one rank in evaluation mode. Its forward pass computes the undivided model; all ranks have to run it together.

    Args:
        folder: A folder of `write`.
        ranks: Adds up over the ranks.
        device: Where it computes.
        dtype: What its float part computes in.

    Raises:
        InputError: The folder is damaged.
    """
    division, config = read_division(folder), Checkpoint(folder, "rank").config
    layers, _ = quantization_of(folder)
    task = task_of(config)
    with quiet():
        model: nn.Module = with_linears(auto_class(task, config).from_config(with_class(config, task), dtype=dtype))
    with_separate_experts(model)
    if division.whole_experts:
        hold(model, division.experts)
    quantize(model, layers)
    try:
        weights = load_file(folder / WEIGHTS)
        apart(model, weights)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}", f"{WEIGHTS} cannot be used ({one_line(error)})", remedy="divide the checkpoint again") from error
    lost = set(missing) - repeated(model) - set(scale_names(layers))
    if lost or unexpected:
        raise InputError(
            f"{folder}", f"{WEIGHTS} does not fit its config.json ({min([*lost, *unexpected])})", remedy="divide the checkpoint again"
        )
    with_rows(model, list(division.rows), ranks)
    if division.whole_experts:
        with_dealt_experts(model, ranks)
    if layers:
        apply_sites(model, folder)
    placed: nn.Module = model.to(device).eval()
    return placed


def read_division(folder: Path) -> Division:
    """Returns the contents of division.json of a folder.

    Raises:
        InputError: It is missing or damaged.
    """
    try:
        found = json.loads((folder / DIVISION).read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA or not 0 <= found["rank"] < found["ranks"]:
            raise ValueError(f"schema {found['schema']}, rank {found['rank']} of {found['ranks']}")
        experts = {str(name): tuple(map(int, numbers)) for name, numbers in found["experts"].items()}
        return Division(int(found["rank"]), int(found["ranks"]), tuple(map(str, found["rows"])), bool(found["whole_experts"]), experts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{folder}", f"{DIVISION} cannot be used ({problem})", remedy="divide the checkpoint again") from error


def quantization_of(folder: Path) -> tuple[dict[str, Scales], dict[str, str]]:
    """Returns the scales by layer and the reasons of float layers; none where a folder is not quantized."""
    return load_quantization(folder) if Checkpoint(folder).is_quantized else ({}, {})


def quantize(model: nn.Module, layers: Mapping[str, Scales]) -> None:
    """Replaces the layers of these names by quantized ones, in place."""
    for name, scales in layers.items():
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, scales.module(name, layer))


def scale_names(layers: Mapping[str, Scales]) -> list[str]:
    """Returns the names of the scales of quantized layers among the buffers of a model."""
    return [f"{name}.{key}" for name, scales in layers.items() for key in scales.tensors()]


def repeated(model: nn.Module) -> set[str]:
    """Returns the further names of tied weights."""
    first = {value.data_ptr(): name for name, value in reversed(list(model.named_parameters(remove_duplicate=False)))}
    return {name for name, value in model.named_parameters(remove_duplicate=False) if first[value.data_ptr()] != name}
