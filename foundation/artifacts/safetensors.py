"""Checks on the safetensors files of a model folder, made before any weight is loaded.

A model folder may hold anything: a half-copied download, a pickle, a model for another task. These checks read only file names and
safetensors headers (name, shape and dtype of every tensor). `first_and_last_rows` reads two rows of a tensor, and `check_finite` streams
the weights once. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.core.errors import InputError
from foundation.core.files import read_plain
from foundation.core.shown import pasted, reason

if TYPE_CHECKING:
    from torch import Tensor

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "tf_model.h5", "flax_model.msgpack")
CONVERT = (
    "from transformers import AutoModelForSequenceClassification as M, AutoTokenizer as T; "
    "M.from_pretrained({0!r}).save_pretrained({1!r}); T.from_pretrained({0!r}).save_pretrained({1!r})"
)
FLOATS = {"F64", "F32", "F16", "BF16"}
MOST_JSON = 2**28
"""Bytes of a JSON file of a model folder."""


def parse_json(data: bytes, *, constants: bool = False) -> Any:
    """Returns the value of a JSON text.

    Args:
        data: The text in UTF-8.
        constants: Whether NaN and Infinity are allowed, which Python writes and RFC 8259 does not know.

    Raises:
        ValueError: It is not JSON in UTF-8, or an escape in it is half a character, which no tokenizer and no file can hold.
        RecursionError: It is nested too deeply.
    """
    text = data.decode("utf-8")
    value = json.loads(text, parse_constant=None if constants else _refuse_constant)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def read_json(file: Path, key: str) -> dict[str, Any]:
    """Returns the JSON object in `file`.

    Raises:
        InputError: The file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = parse_json(read_plain(file, MOST_JSON, f"{key}: {file}"), constants=True)  # configs hold Infinity
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(key, f"{file.parent} has no {file.name}", remedy="give a folder written by save_pretrained") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            key, f"{file} cannot be read as JSON ({reason(error)})", remedy="write the folder again with save_pretrained"
        ) from error
    if not isinstance(value, dict):
        raise InputError(key, f"{file} holds a JSON {type(value).__name__}", "a JSON object is allowed")
    return value


def weight_files(folder: Path, key: str) -> list[Path]:
    """Returns the safetensors files of a model folder: `model.safetensors`, or the shards listed in its index.

    Raises:
        InputError: There are none (only pickles, for example), or a shard is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = sorted(name for name in PICKLES if (folder / name).exists())
        if pickles:
            how = pasted("python", "-c", CONVERT.format(str(folder), f"{folder}-safetensors"))
            raise InputError(
                key, f"{folder} has its weights in {pickles[0]}, which can run code when loaded", remedy=f"convert it first: {how}"
            )
        raise InputError(key, f"{folder} has no weights", "model.safetensors is needed (save_pretrained writes it)")
    shards = read_json(index, key).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) and Path(name).name == name for name in shards.values()):
        raise InputError(key, f"{index} has no usable weight_map", remedy="write the folder again with save_pretrained")
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(key, f"{folder} lacks {', '.join(missing)}, listed in {index.name}", remedy="download it again")
    return files


def headers(folder: Path, key: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the shape and dtype of every tensor in a model folder; reads only the headers.

    Raises:
        InputError: A file is truncated or damaged, or has a tensor called weight that is not floating point.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file, stream in _open(folder, key):
        for name in stream.keys():  # noqa: SIM118 - not a dict
            piece = stream.get_slice(name)
            found[name] = (tuple(piece.get_shape()), piece.get_dtype())
            if name.endswith("weight") and found[name][1] not in FLOATS:
                raise InputError(
                    key, f"{file}: {name} is {found[name][1]}", "only float weights are allowed", "give the model before quantization"
                )
    return found


def first_and_last_rows(folder: Path, key: str, names: Collection[str]) -> dict[str, Tensor]:
    """Returns the first and the last row of some tensors, [2, ...]; reads nothing else. Names that the files do not hold are left out.

    Raises:
        InputError: As of `headers`.
    """
    import torch

    found: dict[str, Tensor] = {}
    for _, stream in _open(folder, key):
        for name in sorted(set(names) & set(stream.keys())):
            piece = stream.get_slice(name)
            rows = piece.get_shape()[0]
            found[name] = torch.cat((piece[:1], piece[rows - 1 :]))
    return found


def check_finite(folder: Path, key: str) -> None:
    """Checks that all weights are finite, reading each once.

    Raises:
        InputError: A tensor holds NaN, infinity, or a number that float32 cannot hold; the message names it.
    """
    import torch

    for file, stream in _open(folder, key):
        for name in stream.keys():  # noqa: SIM118 - not a dict
            if stream.get_slice(name).get_dtype() not in FLOATS:
                continue
            tensor = stream.get_tensor(name)
            bad = int((~torch.isfinite(tensor.float())).sum())
            if bad:
                what = "NaN or infinite" + (" in float32, in which models are computed" if tensor.dtype == torch.float64 else "")
                raise InputError(
                    key, f"{file}: {bad} of {tensor.numel()} values in {name} are {what}", remedy="give a model with finite weights"
                )


def _open(folder: Path, key: str) -> Iterator[tuple[Path, Any]]:
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder, key):
        try:
            with safe_open(file, framework="pt") as stream:
                yield file, stream
        except (SafetensorError, OSError) as error:
            raise InputError(
                key, f"{file} is not a complete safetensors file ({reason(error)})", remedy="copy or download it again"
            ) from error
