"""Model folders from outside: found, and checked before anything is loaded.

A model is named by a local folder or a Hub id. What lies there may be anything: a half-copied download, a pickle, the model of another
task. Every check here reads names and headers alone (a safetensors header gives the name, shape and dtype of every tensor), except
`check_finite`, which streams the weights once. Nothing is unpickled, and no code that came with a model is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.core.errors import InputError

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHT_FILES = ("*.safetensors",)
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
IMAGE_FILES = ("preprocessor_config.json",)
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "tf_model.h5", "flax_model.msgpack")
CONVERT = (
    'python -c "from transformers import AutoModelForSequenceClassification as M, AutoTokenizer as T; '
    "M.from_pretrained('{0}').save_pretrained('{0}-safetensors'); T.from_pretrained('{0}').save_pretrained('{0}-safetensors')\""
)
FLOATS = {"F64", "F32", "F16", "BF16"}
SHAPE_KEY = "compress_architecture"
"""Key of config.json where a model has a shape that a stock config cannot express; see `compress.architecture`."""


def is_local(path: str) -> bool:
    """Whether a model path means a local folder: it exists, or it can be nothing else (it starts with '.', '~' or '/')."""
    return path.startswith((".", "~", "/")) or Path(path).exists()


def find(path: str, key: str, *, weights: bool = True) -> Path:
    """Returns the local folder of a model, tokenizer or processor; a Hub id is downloaded into the Hub's cache.

    Args:
        path: Local folder or Hub id.
        key: Key path in the recipe, for the message.
        weights: Download the weights too; local folders are taken as they are.

    Raises:
        InputError: There is no such folder, it is a file, or the Hub does not give it.
    """
    if not is_local(path):
        return _download(path, key, weights)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"{key}: {path} is a file; a folder with config.json and model.safetensors, or a Hub id, is allowed")
    raise InputError(f"{key}: there is no folder {path}; give an existing folder or a Hub id")


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


def stock_type(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json with the model type that Transformers knows: a shape of its own has another one written."""
    own = raw.get(SHAPE_KEY)
    return {**raw, "model_type": own.get("model_type")} if isinstance(own, dict) else raw


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


def check_tokenizer(folder: Path, key: str) -> None:
    """Checks that there is a vocabulary: without one Transformers makes an empty tokenizer and says nothing.

    Raises:
        InputError: There is none.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES) and not any(folder.glob("*.model")):
        raise InputError(f"{key}: {folder} has no tokenizer (tokenizer.json or {', '.join(VOCABULARIES[1:])}); save it beside the model")


def copy_files(source: Path, out: Path, names: tuple[str, ...]) -> list[str]:
    """Copies those of `names` that `source` has, byte for byte, and returns them."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        shutil.copyfile(source / name, out / name)
    return present


def _open(folder: Path, key: str) -> Iterator[tuple[Path, Any]]:
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder, key):
        try:
            with safe_open(file, framework="pt") as stream:
                yield file, stream
        except (SafetensorError, OSError) as error:
            raise InputError(f"{key}: {file} is no whole safetensors file ({error}); copy or download it again") from error


def _download(path: str, key: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    patterns = list(SMALL_FILES + WEIGHT_FILES) if weights else list(SMALL_FILES)
    what = f"{key}: {path!r} is no local folder"
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise InputError(f"{what} and no Hub id; give an existing folder, or owner/name") from error
    except GatedRepoError as error:
        raise InputError(f"{what}, and the Hub asks for a login to give it; accept its terms there and run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise InputError(f"{what}, and the Hub has no such public model; check the name, or give an existing folder") from error
    except OSError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{what}, and the Hub could not be reached ({reason}); give an existing folder, or go online once") from error
