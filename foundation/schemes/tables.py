"""Tables: the embeddings and the head of a language model with int8 rows.

    T = s q        q int8 [V, D] in [-127, 127], one scale s[v] = max |T[v]| / 127 for each row

A row is the embedding of one token, or the weights of its logit. Rows are looked up or multiplied in float, so that a table changes no
activation: torch runs the float table on its grid, and engines keep the codes. In a small model the tables are a third of the weights, and
the head is read as a whole for every token.

A checkpoint lists its tables in `quantization.json` under `tables`; `quantization.safetensors` holds `<table>.scale`, float32 [V]. A head
that is tied to the embeddings is the same table, listed once under the name of the embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.schemes.checkpoint import QUANTIZATION_JSON, QUANTIZATION_TENSORS, unusable
from foundation.schemes.int8 import levels, on_grid, quantize, weight_scale
from foundation.schemes.scales import positive

LARGEST = levels(8)
KEY = "tables"


def table_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the embeddings of a language model, and its head if that has weights of its own, by module path."""
    known: Any = model
    modules = {module: name for name, module in model.named_modules()}
    words, head = known.get_input_embeddings(), known.get_output_embeddings()
    embeddings = next(module for module in words.modules() if isinstance(module, nn.Embedding))  # in low rank: the narrow table
    found: dict[str, nn.Module] = {modules[embeddings]: embeddings}
    if head is not None and head.weight is not embeddings.weight:
        found[modules[head]] = head
    return found


def row_scale(table_VD: Tensor) -> Tensor:
    """Returns the scale of every row, float32 [V]."""
    return weight_scale(table_VD.float(), LARGEST)


def on_table_grid(table_VD: Tensor, scale_V: Tensor) -> Tensor:
    """Returns a table rounded to the grid of its scales, float32 [V, D]."""
    return on_grid(table_VD.float(), scale_V, LARGEST)


def table_codes(table_VD: Tensor, scale_V: Tensor) -> Tensor:
    """Returns the codes of a table, int8 [V, D]."""
    return quantize(table_VD.float(), scale_V[:, None], -LARGEST, LARGEST)


def save_tables(folder: Path, scales: Mapping[str, Tensor]) -> None:
    """Adds tables to the files that `foundation.schemes.checkpoint.save_quantization` wrote; a head among them is not a float layer
    then."""
    document = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
    tensors = load_file(folder / QUANTIZATION_TENSORS)
    save_file(tensors | {f"{name}.scale": scale.clone() for name, scale in scales.items()}, folder / QUANTIZATION_TENSORS)
    write_json(folder / QUANTIZATION_JSON, document | {KEY: list(scales)})


def load_tables(folder: Path) -> dict[str, Tensor]:
    """Returns the row scales of the tables of a quantized checkpoint by module path; empty where its tables are float.

    Raises:
        InputError: A file is missing or damaged, or a scale is not a positive number.
    """
    try:
        document = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
        names = list(document.get(KEY, []))
        tensors = load_file(folder / QUANTIZATION_TENSORS) if names else {}
        scales = {str(name): tensors[f"{name}.scale"] for name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise unusable(folder, error) from error
    for name, scale in scales.items():
        if scale.dim() != 1 or not positive(scale):
            raise InputError(f"{folder}", f"{name}: its scales must be positive numbers, one for each row", remedy="quantize again")
    return scales
