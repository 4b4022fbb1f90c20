"""Quantized checkpoints: what is written beside the weights, and how the quantized layers get into a model again.

A scheme says in which numbers a linear layer multiplies. Each has a file of its own, with the scales of a layer and the layer itself:

    w8a8           int8 weights, int8 activations with one scale from calibration       `compress.schemes.int8`
    w8a8-dynamic   int8 weights, int8 activations with a scale for each token           `compress.schemes.int8`
    w4a16          int4 weights with a scale for each group of inputs, the rest float   `compress.schemes.int4`
    fp8            E4M3 weights, E4M3 activations with one scale from calibration       `compress.schemes.fp8`

A quantized checkpoint keeps its weights in float32, or in the 16 bits of the model that it was made of, rounded to the grid of the scheme
(scale times code, from which the code comes back exactly), in model.safetensors, so that stock Transformers loads it in float; the scales
are in `quantization.safetensors`, and scheme, settings and float layers in `quantization.json`. All quantized layers of a checkpoint have
one scheme.

Left out: checkpoints of packed integers, which `export.compressed_tensors` writes for other programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from compress.artifacts.artifact import write_json
from compress.artifacts.safetensors import headers
from compress.core.errors import InputError
from compress.schemes.scales import Scales
from compress.schemes.table import SCHEMES

QUANTIZATION_JSON, QUANTIZATION_TENSORS = "quantization.json", "quantization.safetensors"
SHORT_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16}


def save_quantization(folder: Path, layers: Mapping[str, Scales], float_layers: Mapping[str, str]) -> None:
    """Writes `quantization.json` and `quantization.safetensors`.

    Args:
        folder: Checkpoint folder; its model.safetensors holds the weights of `layers` on their grids.
        layers: Scales by module path, of one scheme; at least one.
        float_layers: For each linear layer that stays float, the reason.
    """
    (scheme,) = {scales.SCHEME for scales in layers.values()}
    tensors = {f"{name}.{key}": tensor for name, scales in layers.items() for key, tensor in scales.tensors().items()}
    # cloned: layers that read one tensor may share the very scale, and safetensors refuses tensors that share memory
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / QUANTIZATION_TENSORS)
    save_settings(folder, scheme, {name: scales.entry() for name, scales in layers.items()}, float_layers)


def save_settings(folder: Path, scheme: str, entries: Mapping[str, Mapping[str, Any]], float_layers: Mapping[str, str]) -> None:
    """Writes `quantization.json`; the scales stand in `quantization.safetensors` already.

    Args:
        folder: Checkpoint folder.
        scheme: Of all layers.
        entries: What the scales of each layer keep beside tensors, by module path.
        float_layers: For each linear layer that stays float, the reason.
    """
    bits = {entry["weight_bits"] for entry in entries.values()}
    document = {
        "schema": 1,
        "scheme": scheme,
        "weight_bits": bits.pop() if len(bits) == 1 else None,
        "layers": {name: dict(entry) for name, entry in entries.items()},
        "float_layers": dict(float_layers),
    }
    write_json(folder / QUANTIZATION_JSON, document)


def load_quantization(folder: Path) -> tuple[dict[str, Scales], dict[str, str]]:
    """Returns the scales by module path, and the reasons of the layers that stay float.

    Raises:
        InputError: A file is missing or damaged, or of another version.
    """
    try:
        document = _document(folder)
        tensors, read = load_file(folder / QUANTIZATION_TENSORS), SCHEMES[document["scheme"]].scales().read
        return {name: read(name, tensors, entry) for name, entry in document["layers"].items()}, dict(document["float_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise unusable(folder, error) from error


def scheme_of(folder: Path) -> str | None:
    """Returns the scheme of a checkpoint; None for a float one.

    Raises:
        InputError: `quantization.json` is damaged, or of another version.
    """
    if not (folder / QUANTIZATION_JSON).exists():
        return None
    try:
        return str(_document(folder)["scheme"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unusable(folder, error) from error


def _document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
    if document["schema"] != 1 or document["scheme"] not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ValueError(f"schema {document['schema']}, scheme {document['scheme']}; schema 1, scheme {known} is what this version reads")
    return document


def unusable(folder: Path, error: Exception) -> InputError:
    """Returns what is raised where the files of a quantized checkpoint cannot be read."""
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return InputError(f"{folder}: {QUANTIZATION_JSON} and {QUANTIZATION_TENSORS} cannot be used ({problem}); quantize again")


def apply_quantization(model: nn.Module, folder: Path) -> None:
    """Replaces the quantized linear layers of a model that was loaded in float by those of the scheme, in place.

    Args:
        model: Model with the grid weights of the checkpoint.
        folder: The checkpoint.

    Raises:
        InputError: Files are damaged, or the scales do not belong to the weights.
    """
    layers, _ = load_quantization(folder)
    modules = dict(model.named_modules())
    stored = {name: SHORT_FLOATS[kind] for name, (_, kind) in headers(folder, "checkpoint").items() if kind in SHORT_FLOATS}
    for name, scales in layers.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            raise InputError(f"{folder}: {QUANTIZATION_JSON} names {name}, which is no linear layer of the model; quantize again")
        problem = scales.problem(_as_stored(linear, stored.get(f"{name}.weight")))
        if problem is not None:
            raise InputError(f"{folder}: {name}: {problem}; quantize again")
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, scales.module(name, linear))


def _as_stored(linear: nn.Linear, dtype: torch.dtype | None) -> nn.Linear:
    """Returns a layer with its weight in the type that it was stored in: what is near enough to a grid depends on that."""
    if dtype is None:
        return linear
    stored = nn.Linear(linear.in_features, linear.out_features, False, device="meta")
    stored.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
    return stored
