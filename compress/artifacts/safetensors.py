"""Weights in safetensors files, read by their headers: what a model folder holds, checked before anything is loaded.

What lies in a folder may be anything: a half-copied download, a pickle, the model of another task. The checks here read names and headers
alone (a safetensors header gives the name, shape and dtype of every tensor), except `check_finite`, which streams the weights once. Nothing
is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.core.errors import InputError

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "tf_model.h5", "flax_model.msgpack")
CONVERT = (
    'python -c "from transformers import AutoModelForSequenceClassification as M, AutoTokenizer as T; '
    "M.from_pretrained('{0}').save_pretrained('{0}-safetensors'); T.from_pretrained('{0}').save_pretrained('{0}-safetensors')\""
)
FLOATS = {"F64", "F32", "F16", "BF16"}


def read_json(file: Path, key: str) -> dict[str, Any]:
    """Returns the JSON map in `file`.

    Raises:
        InputError: It is missing, unreadable, no JSON, or no map.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{key}: {file.parent} has no {file.name}; a folder written by save_pretrained is allowed") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{key}: {file} cannot be read as JSON ({error}); write the folder again with save_pretrained") from error
    if not isinstance(value, dict):
        raise InputError(f"{key}: {file} holds a {type(value).__name__}; a JSON map is allowed")
    return value


def weight_files(folder: Path, key: str) -> list[Path]:
    """Returns the safetensors files of a model folder: `model.safetensors`, or the shards that its index names.

    Raises:
        InputError: There are none (only pickles, for example), or a shard is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = sorted(name for name in PICKLES if (folder / name).exists())
        if pickles:
            how = CONVERT.format(folder)
            raise InputError(f"{key}: {folder} holds its weights as {pickles[0]}, which can run code when read; convert it first: {how}")
        raise InputError(f"{key}: {folder} has no weights; model.safetensors is allowed (written by save_pretrained)")
    shards = read_json(index, key).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) and Path(name).name == name for name in shards.values()):
        raise InputError(f"{key}: {index} has no usable weight_map; write the folder again with save_pretrained")
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(f"{key}: {folder} lacks {', '.join(missing)}, which {index.name} names; download it again")
    return files


def headers(folder: Path, key: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of every tensor in a model folder, from the headers alone.

    Raises:
        InputError: A file is truncated or damaged, or holds weights that are no floats.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file, stream in _open(folder, key):
        for name in stream.keys():  # noqa: SIM118 - not a dict
            piece = stream.get_slice(name)
            found[name] = (tuple(piece.get_shape()), piece.get_dtype())
            if name.endswith("weight") and found[name][1] not in FLOATS:
                raise InputError(
                    f"{key}: {file}: {name} is {found[name][1]}; float weights are allowed: give the model before quantization"
                )
    return found


def check_finite(folder: Path, key: str) -> None:
    """Reads every weight once.

    Raises:
        InputError: Some tensor holds NaN or infinity; names it.
    """
    import torch

    for file, stream in _open(folder, key):
        for name in stream.keys():  # noqa: SIM118 - not a dict
            tensor = stream.get_tensor(name)
            bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
            if bad:
                raise InputError(
                    f"{key}: {file}: {name} holds {bad} NaN or infinite values of {tensor.numel()}; give a model that is whole"
                )


def _open(folder: Path, key: str) -> Iterator[tuple[Path, Any]]:
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder, key):
        try:
            with safe_open(file, framework="pt") as stream:
                yield file, stream
        except (SafetensorError, OSError) as error:
            raise InputError(f"{key}: {file} is no whole safetensors file ({error}); copy or download it again") from error
