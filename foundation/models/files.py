"""Finds and checks model folders before anything is loaded.

A model is given as a local folder or a Hub id. The folder may lack a tokenizer or hold a model for another task.
`foundation.artifacts.safetensors` checks the weights. Python code that comes with a model is never run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from foundation.core.errors import InputError
from foundation.core.files import check_plain, local
from foundation.core.shown import shown
from foundation.core.stamps import Stamps, stamps

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


def state_of(folder: Path) -> Stamps:
    """Returns the stamps of the small files of a model folder; in the key of a cache of what they say."""
    return stamps(file for pattern in SMALL_FILES for file in sorted(folder.glob(pattern)))


def is_local(path: str) -> bool:
    """Whether a model path is a local folder and not a Hub id: it exists, or starts with '.', '~' or '/'."""
    return path.startswith((".", "~", "/")) or local(path, "model").exists()


def find(path: str, key: str, *, weights: bool = True) -> Path:
    """Returns the local folder of a model, tokenizer or processor; downloads a Hub id into the Hub's cache.

    Args:
        path: Local folder or Hub id.
        key: Key path in the recipe, for the message.
        weights: Whether to download the weights too; no effect on local folders.

    Raises:
        InputError: The folder does not exist, is a file, or cannot be downloaded.
    """
    if not is_local(path):
        return _download(path, key, weights)
    folder = local(path, key)
    if folder.is_dir():
        for pattern in SMALL_FILES + WEIGHT_FILES:
            for file in folder.glob(pattern):
                if not file.is_dir():
                    check_plain(file, f"{key}: {file}")
        return folder
    if folder.exists():
        raise InputError(key, f"{path} is a file", "a folder with config.json and model.safetensors, or a Hub id, is allowed")
    raise InputError(key, f"there is no folder {path}", remedy="give an existing folder or a Hub id")


def check_tokenizer(folder: Path, key: str) -> None:
    """Checks that a folder has a vocabulary; without one Transformers silently creates an empty tokenizer.

    Raises:
        InputError: There is no vocabulary.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES) and not any(folder.glob("*.model")):
        raise InputError(
            key, f"{folder} has no tokenizer (tokenizer.json or {', '.join(VOCABULARIES[1:])})", remedy="save it next to the model"
        )


def copy_files(source: Path, out: Path, names: tuple[str, ...]) -> list[str]:
    """Copies those files of `names` that exist in `source`; returns their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        shutil.copyfile(source / name, out / name)
    return present


def fetched(folder: Path, name: str, path: str | None, key: str) -> Path:
    """Returns a file in a subfolder of a model; `find` downloads none of those, so that one of a Hub id is downloaded here.

    Args:
        folder: What `find` returned.
        name: The file, relative to it.
        path: The local folder or Hub id that was given.
        key: Key path in the recipe, for the message.

    Raises:
        InputError: It cannot be downloaded, or leads out of the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:  # not by resolving: files in the Hub's cache are links out of the folder
        raise InputError(key, f"{folder} names the file {shown(name)}, which is outside of it", remedy="give a complete model")
    if path is None or is_local(path) or (folder / name).is_file():
        return folder / name
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name, revision=folder.name))
    except OSError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            key, f"{name} of {path} cannot be downloaded ({first})", remedy="give a local folder, or go online once"
        ) from error


def _download(path: str, key: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    patterns = list(SMALL_FILES + WEIGHT_FILES) if weights else list(SMALL_FILES)
    what = f"{shown(path, 120)} is not a local folder"
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise InputError(key, f"{what} and not a Hub id", remedy="give an existing folder, or owner/name") from error
    except GatedRepoError as error:
        raise InputError(
            key, f"{what}, and the Hub requires a login for it", remedy="accept its terms there and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            key, f"{what}, and the Hub has no such public model", remedy="check the name, or give an existing folder"
        ) from error
    except OSError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            key, f"{what}, and the Hub could not be reached ({first})", remedy="give an existing folder, or go online once"
        ) from error
