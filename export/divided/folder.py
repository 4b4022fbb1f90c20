"""The folders of a checkpoint that is divided over ranks, one for each; `export.divided.rank` loads them.

    DIR/rank-0-of-2/
      config.json                  the sizes of what this rank holds
      rank.safetensors             codes of quantized layers (int8, or two int4 a byte), and all other weights as they are
      quantization.json            scheme and layers, as next to every quantized checkpoint; none where it is not quantized
      quantization.safetensors     scales of what this rank holds
      division.json                rank, number of ranks, the layers after which ranks add up, and the experts that this rank holds
      tokenizer.json, ...          copies
    DIR/rank-1-of-2/ ...

A rank reads its own folder only: the bytes of its weights are those that it holds, and nothing is quantized again. The weights are not
called model.safetensors, because a part of a model is not a checkpoint, and loaders of checkpoints refuse it.

Left out: models that do not fit into the memory of the host, which are read as a whole to be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from export.divided.cut import cut, cut_group, cut_scales, held_by, nearest, of_experts, refusal, sizes_on_each
from export.divided.dealt_experts import hold
from export.divided.placement import Placement
from export.divided.rank import DIVISION, SCHEMA, WEIGHTS, folder_of, quantization_of, quantize, repeated, scale_names
from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import headers
from foundation.core.errors import InputError
from foundation.models.architecture.axes import Axis
from foundation.models.architecture.shapes import mark, on_meta, with_sizes
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load_float
from foundation.models.files import IMAGE_FILES, TEXT_FILES, copy_files
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import is_stacked, with_separate_experts
from foundation.models.library import quiet
from foundation.models.tied import shared_as
from foundation.schemes.checkpoint import SHORT_FLOATS, save_quantization
from foundation.schemes.scales import Scales
from foundation.schemes.sites import load_sites, save_sites

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_division(config: PreTrainedConfig, ranks: int, key: str, whole_experts: bool = False) -> None:
    """Checks a division of the model of a config; reads no weights.

    Raises:
        InputError: Some block cannot be divided so; the message says over how many ranks it can.
    """
    structure = Structure.of(on_meta(config), key)
    if whole_experts and not any(structure.sizes.experts):
        raise InputError(key, f"whole experts are asked for of {config.model_type}, which has none", remedy="give expert_parallel: false")
    _refuse(ranks, lambda n: refusal(structure, n, whole_experts), key)


def write(checkpoint: Checkpoint, out: Path, ranks: int, key: str, placements: Mapping[str, Placement] | None = None) -> list[Path]:
    """Writes the folders of all ranks; returns them, in order of rank.

    Args:
        checkpoint: A checkpoint, quantized or not.
        out: Folder to write into; made, with its parents.
        ranks: Number of ranks.
        key: Key path in the recipe, for messages.
        placements: The experts of each rank by layer of experts, if they are dealt out whole (`expert_layers`).

    Raises:
        InputError: The model cannot be divided so.
    """
    whole_experts = placements is not None
    types = {SHORT_FLOATS.get(kind) for _, kind in headers(checkpoint.folder, "checkpoint").values()}
    dtype = types.pop() if len(types) == 1 else None  # as it is stored: what is not quantized keeps its bytes
    whole = load_float(checkpoint.folder, dtype or torch.float32)
    structure, (layers, floating) = Structure.of(whole, key), quantization_of(checkpoint.folder)
    held_of = partial(_held, whole, structure, whole_experts)
    _refuse(ranks, lambda n: refusal(structure, n, whole_experts) or cut_group(layers, held_of(0, n)), key)
    config = with_sizes(whole.config, sizes_on_each(structure.sizes, ranks, whole_experts), key)
    folders = [folder_of(out, rank, ranks) for rank in range(ranks)]
    for rank, folder in enumerate(folders):
        folder.mkdir(parents=True)
        held = held_of(rank, ranks)
        model = _cut_model(whole, held_by(structure, rank, ranks, whole_experts), config)
        experts = {name: placement[rank] for name, placement in (placements or {}).items()}
        if whole_experts:
            hold(model, experts)
        here = {name for name, _ in model.named_modules()}
        own = {name: cut_scales(scales, name, held) for name, scales in layers.items() if name in here}
        rows = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear) and (f"{name}.weight", 1) in held)
        quantize(model, own)
        save_file(_weights(model, own), folder / WEIGHTS, metadata={"format": "pt"})
        with quiet():
            config.save_pretrained(folder)
        mark(folder)
        if own:
            save_quantization(folder, own, floating)
            save_sites(folder, load_sites(checkpoint.folder))
        division = {"rank": rank, "ranks": ranks, "rows": list(rows), "whole_experts": whole_experts, "experts": experts}
        write_json(folder / DIVISION, {"schema": SCHEMA, **division})
        copy_files(checkpoint.folder, folder, TEXT_FILES + IMAGE_FILES)
    return folders


def expert_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Returns the number of experts of each layer of experts, in order; reads no weights."""
    return {name: int(module.num_experts) for name, module in on_meta(config).named_modules() if is_stacked(module)}


def _refuse(ranks: int, refused: Callable[[int], str | None], key: str) -> None:
    problem = refused(ranks)
    if problem is not None:
        other = nearest(ranks, refused)
        allowed = f"give {other}, the nearest number that fits" if other > 1 else "no number of ranks near it fits: leave it out"
        raise InputError(key, f"{ranks} given, but {problem}", allowed)


def _held(whole: nn.Module, structure: Structure, whole_experts: bool, rank: int, ranks: int) -> dict[Axis, Tensor]:
    """Returns the indices that a rank holds by axis, experts one by one."""
    stacked = {
        f"{path}.{name}": (bool(module.is_transposed), int(module.num_experts))
        for path, module in whole.named_modules()
        if is_stacked(module)
        for name in module._parameters
    }
    held = held_by(structure, rank, ranks, whole_experts)
    return of_experts(held, {name: turned for name, (turned, _) in stacked.items()}, {name: count for name, (_, count) in stacked.items()})


def _cut_model(whole: nn.Module, held: Mapping[Axis, Tensor], config: PreTrainedConfig) -> nn.Module:
    """Returns the float model of what a rank holds along each axis, experts one by one; its buffers have no values."""
    model, source = on_meta(config), whole.state_dict()
    shared_as(model, whole)
    sliced = {name: cut(source[name], name, held) for name in model.state_dict()}
    for name, wanted in model.state_dict().items():
        if sliced[name].shape != wanted.shape:
            given = f"{list(sliced[name].shape)} of this {config.model_type} on each rank"
            raise InputError(name, given, f"{list(wanted.shape)} is needed")
    model.load_state_dict(sliced, assign=True)
    return with_separate_experts(model)


def _weights(model: nn.Module, layers: Mapping[str, Scales]) -> dict[str, Tensor]:
    """Returns the weights of a rank to store: tied ones once, and no scales, which have a file of their own."""
    left_out = repeated(model) | set(scale_names(layers))
    return {name: value.contiguous() for name, value in model.state_dict().items() if name not in left_out}
