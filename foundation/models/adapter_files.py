"""The files of the adapters of a checkpoint, next to the model that all of them share.

    adapters.json            {"schema": 1, "names": [...], "layers": {ADAPTER: [LAYER, ...]}}; an adapter without layers is the model itself
    adapters.safetensors     ADAPTER/LAYER.down [r, I], ADAPTER/LAYER.up [O, r], where a bias changes ADAPTER/LAYER.bias [O]; all float32

The model stays what it was, byte for byte: float, or quantized with its integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError
from foundation.models.adapter_names import check_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.models.layers.adapter_stack import Adapter

ADAPTERS_JSON, ADAPTERS_TENSORS = "adapters.json", "adapters.safetensors"
SCHEMA = 1


def adapter_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the adapters of a checkpoint, in the order of their numbers; empty for a checkpoint without.

    Raises:
        InputError: The file is damaged.
    """
    return tuple(_layers(folder))


def write_adapters(folder: Path, adapters: Mapping[str, Adapter]) -> None:
    """Writes the adapters of a checkpoint into its folder.

    Args:
        folder: The folder.
        adapters: By name, in the order of their numbers.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        for layer, change in adapter.items():
            parts = {"down": change.down, "up": change.up, "bias": change.bias}
            tensors |= {f"{name}/{layer}.{part}": one.cpu().contiguous().clone() for part, one in parts.items() if one is not None}
    save_file(tensors, folder / ADAPTERS_TENSORS)
    layers = {name: list(adapter) for name, adapter in adapters.items()}
    write_json(folder / ADAPTERS_JSON, {"schema": SCHEMA, "names": list(adapters), "layers": layers})


def read_adapters(folder: Path) -> dict[str, Adapter]:
    """Returns the adapters of a checkpoint by name, in the order of their numbers.

    Raises:
        InputError: A file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from foundation.models.layers.adapter_stack import Change

    layers = _layers(folder)
    try:
        stored = load_file(folder / ADAPTERS_TENSORS)
        found: dict[str, Adapter] = {
            name: {
                layer: Change(stored[f"{name}/{layer}.down"], stored[f"{name}/{layer}.up"], stored.get(f"{name}/{layer}.bias"))
                for layer in changed
            }
            for name, changed in layers.items()
        }
    except (OSError, KeyError, SafetensorError) as error:
        raise _unusable(folder, error) from error
    for name, tensor in stored.items():
        if not tensor.isfinite().all():
            raise InputError(f"{folder / ADAPTERS_TENSORS}", f"{name} has values that are NaN or infinite", remedy="train it again")
    return found


def apply_adapters(model: nn.Module, folder: Path) -> None:
    """Puts the adapters of a checkpoint on its model, in place; does nothing for a checkpoint without.

    Raises:
        InputError: A file is damaged, or does not belong to the model.
    """
    if not (folder / ADAPTERS_JSON).is_file():
        return
    from foundation.models.layers.adapter_stack import put

    put(model, list(read_adapters(folder).values()))


def _layers(folder: Path) -> dict[str, list[str]]:
    """Returns the layers that each adapter changes."""
    file = folder / ADAPTERS_JSON
    if not file.is_file():
        return {}
    try:
        document = read_json(file, "checkpoint")
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}; this version reads {SCHEMA}")
        return {check_name(name, str(file)): [str(layer) for layer in document["layers"][name]] for name in document["names"]}
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: Exception) -> InputError:
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return InputError(f"{folder}", f"{ADAPTERS_JSON} and {ADAPTERS_TENSORS} cannot be used ({problem})", remedy="train the adapters again")
