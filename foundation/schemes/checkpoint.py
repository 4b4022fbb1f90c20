"""Quantized checkpoints: the files written next to the weights, and how quantized layers are restored from them.

A scheme defines the number formats of a layer. Each scheme file has a class for the scales of a layer and the quantized layer:

    w8a8           int8 weights, int8 activations with one calibrated scale per tensor     `foundation.schemes.int8`
                   the same for convolutions                                               `foundation.schemes.int8_convolution`
    w8a8-dynamic   int8 weights, int8 activations with a scale per token, set at run time  `foundation.schemes.int8`
    w8a16          int8 weights, float activations                                         `foundation.schemes.int8_weights`
    w4a16          int4 weights with a scale per group of inputs, float activations        `foundation.schemes.int4`
    w4a8-block     the same weights, int8 activations with a scale per group, at run time  `foundation.schemes.int4_by_int8`
    fp8            E4M3 weights, E4M3 activations with one calibrated scale per tensor     `foundation.schemes.fp8`

model.safetensors holds the weights in float32, or in the 16-bit type of the source model, rounded to the grid of the scheme: each weight is
scale times code, from which the code is recovered exactly. Stock Transformers therefore loads the checkpoint as a float model.
`quantization.safetensors` holds the scales; `quantization.json` holds the scheme, its settings and the list of float layers. All quantized
layers of a checkpoint use the same scheme.

Not supported: checkpoints with packed integers (`export.compressed_tensors` writes those for other programs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import headers
from foundation.core.errors import InputError
from foundation.schemes.scales import Entry, Scales
from foundation.schemes.table import SCHEMES, SchemeFacts

QUANTIZATION_JSON, QUANTIZATION_TENSORS = "quantization.json", "quantization.safetensors"
SHORT_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16}


class Document(TypedDict):
    """Contents of `quantization.json`, without what `foundation.schemes.sites` and `foundation.schemes.tables` add."""

    schema: int
    scheme: str
    weight_bits: int | None
    """Bits of all layers; None where they differ."""
    layers: dict[str, Entry]
    float_layers: dict[str, str]


def save_quantization(folder: Path, layers: Mapping[str, Scales], float_layers: Mapping[str, str]) -> None:
    """Writes `quantization.json` and `quantization.safetensors`.

    Args:
        folder: Checkpoint folder; its model.safetensors holds the weights of `layers`, rounded to their grids.
        layers: Scales by module path; at least one, all of the same scheme.
        float_layers: The reason for each layer that stays float.
    """
    (scheme,) = {scales.SCHEME for scales in layers.values()}
    tensors = {f"{name}.{key}": tensor for name, scales in layers.items() for key, tensor in scales.tensors().items()}
    # cloned: layers that read the same tensor may share a scale, and safetensors rejects tensors that share memory
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, folder / QUANTIZATION_TENSORS)
    save_settings(folder, scheme, {name: scales.entry() for name, scales in layers.items()}, float_layers)


def save_settings(folder: Path, scheme: str, entries: Mapping[str, Entry], float_layers: Mapping[str, str]) -> None:
    """Writes `quantization.json` only; the caller writes `quantization.safetensors`.

    Args:
        folder: Checkpoint folder.
        scheme: Scheme of all layers.
        entries: `Scales.entry()` of each layer, by module path.
        float_layers: The reason for each layer that stays float.
    """
    bits = {entry["weight_bits"] for entry in entries.values()}
    document: Document = {
        "schema": 1,
        "scheme": scheme,
        "weight_bits": bits.pop() if len(bits) == 1 else None,
        "layers": dict(entries),
        "float_layers": dict(float_layers),
    }
    write_json(folder / QUANTIZATION_JSON, document)


def load_quantization(folder: Path) -> tuple[dict[str, Scales], dict[str, str]]:
    """Returns the scales by module path, and the reason for each layer that stays float.

    Raises:
        InputError: A file is missing, damaged or of another version.
    """
    try:
        document = _document(folder)
        tensors, row = load_file(folder / QUANTIZATION_TENSORS), SCHEMES[document["scheme"]]
        layers = {name: _class_of(entry, row).read(name, tensors, entry) for name, entry in document["layers"].items()}
        return layers, dict(document["float_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise unusable(folder, error) from error


def _class_of(entry: Entry, row: SchemeFacts) -> type[Scales]:
    if not entry.get("convolution"):
        return row.scales()
    if row.convolutions is None:
        raise ValueError("its scheme has no convolutions")
    return row.convolutions()


def scheme_of(folder: Path) -> str | None:
    """Returns the scheme of a checkpoint, or None if it is not quantized.

    Raises:
        InputError: `quantization.json` is damaged or of another version.
    """
    if not (folder / QUANTIZATION_JSON).exists():
        return None
    try:
        return str(_document(folder)["scheme"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unusable(folder, error) from error


def _document(folder: Path) -> Document:
    document: Document = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
    if document["schema"] != 1 or document["scheme"] not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ValueError(f"schema {document['schema']}, scheme {document['scheme']}; this version reads schema 1, schemes {known}")
    return document


def unusable(folder: Path, error: Exception) -> InputError:
    """Returns the error to raise if the files of a quantized checkpoint cannot be read."""
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return InputError(f"{folder}", f"{QUANTIZATION_JSON} and {QUANTIZATION_TENSORS} cannot be used ({problem})", remedy="quantize again")


def apply_quantization(model: nn.Module, folder: Path) -> None:
    """Replaces layers of a model that was loaded in float by the quantized layers of its checkpoint, in place.

    Args:
        model: Model with the checkpoint's weights, which are on the grid; experts that are quantized are layers of their own.
        folder: The checkpoint.

    Raises:
        InputError: Files are damaged, or scales and weights do not match.
    """
    layers, _ = load_quantization(folder)
    modules = dict(model.named_modules())
    stored = {name: SHORT_FLOATS[kind] for name, (_, kind) in headers(folder, "checkpoint").items() if kind in SHORT_FLOATS}
    for name, scales in layers.items():
        found = modules.get(name)
        if not isinstance(found, scales.LAYERS):
            what = "a linear layer" if nn.Linear in scales.LAYERS else "a convolution"
            raise InputError(f"{folder}", f"{QUANTIZATION_JSON} names {name}, which is not {what} of the model", remedy="quantize again")
        layer: Any = found
        weight: Tensor = layer.weight.detach()
        # the stored dtype determines the tolerance of the grid check
        stack = name.rpartition(".")[0]  # of an expert: all of a layer are stored in one tensor
        problem = scales.problem(weight.to(stored.get(f"{name}.weight", stored.get(stack, weight.dtype))))
        if problem is not None:
            raise InputError(f"{folder}", f"{name}: {problem}", remedy="quantize again")
        model.set_submodule(name, scales.module(name, layer))
