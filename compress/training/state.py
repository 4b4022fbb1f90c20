"""The checkpoint inside a training stage: everything that a killed run needs to go on as if nothing had happened.

One folder, written beside the last one and renamed over it: `tensors.safetensors` (weights, best weights, optimizer, generators of
torch) and `state.json` (position, history, generators of numpy and Python, the settings it belongs to, the sha256 of the tensors). A
folder that is damaged, or that belongs to other settings, is not used, and a warning says so. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.artifacts.artifact import file_digest, write_json, writing

SCHEMA = 1
FOLDER = "training"
TENSORS = "tensors.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class State:
    """What is saved."""

    tensors: dict[str, Tensor]
    """Everything that is a tensor, by name."""
    values: dict[str, Any]
    """Everything else: JSON types."""


def write_state(scratch: Path, settings: Mapping[str, Any], state: State) -> None:
    """Replaces the checkpoint in `scratch` by `state`, in one step.

    Args:
        scratch: Folder of the stage; made where absent.
        settings: What the training depends on (JSON types); `read_state` wants the same.
        state: What to save, as it stands; the generators are added here.
    """
    from safetensors.torch import save_file

    python, numbers = random.getstate(), np.random.get_state(legacy=False)
    assert isinstance(numbers, dict), type(numbers)
    tensors = _unshared({**state.tensors, **{f"generator.{name}": value for name, value in _torch_generators().items()}})
    generators = {"python": [python[0], list(python[1]), python[2]], "numpy": {**numbers, "state": _plain(numbers["state"])}}
    with writing(scratch / FOLDER) as folder:
        save_file(tensors, folder / TENSORS)
        document = {
            "schema": SCHEMA,
            "settings": settings,
            "sha256": file_digest(folder / TENSORS),
            "values": state.values,
            "generators": generators,
        }
        write_json(folder / STATE, document)


def read_state(scratch: Path, settings: Mapping[str, Any], warn: Callable[[str], None]) -> State | None:
    """Returns the checkpoint in `scratch` and sets the generators; None where there is none that can be used, with a warning."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = scratch / FOLDER
    for leftover in scratch.glob(f".{FOLDER}.*"):  # a kill in the middle of writing
        shutil.rmtree(leftover)
    if not folder.exists():
        return None
    try:
        document = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or document["settings"] != json.loads(json.dumps(settings)):
            warn(f"{folder}: a training checkpoint of other settings, not used")
            return None
        if file_digest(folder / TENSORS) != document["sha256"]:
            raise ValueError(f"contents of {TENSORS} are not what {STATE} says")
        tensors = load_file(folder / TENSORS)
        _restore_generators(tensors, document["generators"])
        return State({name: value for name, value in tensors.items() if not name.startswith("generator.")}, document["values"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        warn(f"{folder}: the training checkpoint is damaged and not used; training starts again ({error})")
        return None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch, numpy and Python inside, and puts them back as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def weights_digest(module: nn.Module) -> str:
    """Returns the sha256 (hex) of all parameters and buffers."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _torch_generators() -> dict[str, Tensor]:
    states = {"cpu": torch.random.get_rng_state()}
    return states | {f"cuda{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}


def _restore_generators(tensors: Mapping[str, Tensor], generators: Mapping[str, Any]) -> None:
    version, numbers, gauss = generators["python"]
    random.setstate((version, tuple(numbers), gauss))
    state = generators["numpy"]["state"]
    np.random.set_state({**generators["numpy"], "state": {**state, "key": np.array(state["key"], np.uint32)}})
    torch.random.set_rng_state(tensors["generator.cpu"])
    for i in range(torch.cuda.device_count()):
        torch.cuda.set_rng_state(tensors[f"generator.cuda{i}"], i)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state.items()}


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies to the CPU what is not there, and all but the first of tensors that share memory: safetensors refuses those."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        pointer = value.untyped_storage().data_ptr()
        result[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return result
