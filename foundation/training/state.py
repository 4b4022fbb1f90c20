"""The checkpoint within a training stage: everything that a killed run needs to resume exactly.

A folder that is written next to the previous one and then renamed over it: `tensors.safetensors` (weights, best weights, optimizer, torch
generators) and `state.json` (position, history, numpy and Python generators, settings, sha256 of the tensors). A checkpoint that is damaged
or has other settings is skipped with a warning. No pickle.

Tensors are gathered, written and read one at a time, through the memory of the file: a divided model, with its moments thrice as large, is
whole in no process. The file holds whole tensors, and so is read by any number of processes, or one.

Left out: `torch.distributed.checkpoint`, whose files hold what each process has. They are read by other numbers of processes too, but
processes that share layers keep the rows of a weight in an order that depends on their number, which its files do not know.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foundation.artifacts.artifact import file_digest, put_back, write_json, writing
from foundation.artifacts.shards import ShardWriter, stored_in
from foundation.standalone.preprocess import Row

SCHEMA = 2
FOLDER = "training"
STEM = "tensors"
TENSORS = f"{STEM}.safetensors"
STATE = "state.json"

Gathers = Mapping[str, Callable[[], Tensor]]
"""Tensors by name, each made whole on the CPU when its function is called. Where several processes hold the parts, all of them must call
all functions, in the order of the mapping; what those return that do not write is of no use."""


@dataclass(frozen=True)
class Unwritten:
    """Contents of a checkpoint of the current state."""

    tensors: Gathers
    """All tensors; types with fewer bytes come last."""
    values: Mapping[str, object]
    """Everything else: JSON types."""

    def gather(self) -> None:
        """Takes part in the gathering of tensors that another process writes."""
        for gather in self.tensors.values():
            gather()


@dataclass(frozen=True)
class State:
    """The contents of a training checkpoint."""

    tensors: dict[str, Tensor]
    """All tensors by name; read-only, in the memory of the file."""
    values: dict[str, Any]
    """Everything else: JSON types."""


class Entry(NamedTuple):
    """A tensor of a checkpoint, which may have no memory before it is asked for."""

    dtype: torch.dtype
    shape: torch.Size
    """The shape of the whole tensor."""
    make: Callable[[], Tensor]
    """Returns this process's shard of it."""

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """Returns the entry of a tensor that is there."""
        return cls(tensor.dtype, tensor.shape, tensor.detach)


def by_bytes(entries: Iterable[tuple[str, Entry]]) -> dict[str, Entry]:
    """Sorts entries so that each begins at a multiple of its type's size; within a type the order stays."""
    return dict(sorted(entries, key=lambda named: -named[1].dtype.itemsize))


def write_state(scratch: Path, settings: Mapping[str, object], state: Unwritten) -> None:
    """Atomically replaces the checkpoint in `scratch`.

    Args:
        scratch: Folder of the stage; created if missing.
        settings: The dependencies of the training (JSON types); `read_state` requires the same.
        state: What to save; this function adds the random generators.
    """
    python, numbers = random.getstate(), np.random.get_state(legacy=False)
    assert isinstance(numbers, dict), type(numbers)
    drawn = {f"generator.{name}": value for name, value in _torch_generators().items()}
    generators = {"python": [python[0], list(python[1]), python[2]], "numpy": {**numbers, "state": _plain(numbers["state"])}}
    with writing(scratch / FOLDER) as folder:
        writer = ShardWriter(folder, [*state.tensors, *drawn], STEM, limit=None)
        for name, gather in state.tensors.items():
            writer.copy(name, gather())
        for name, generator in drawn.items():
            writer.copy(name, generator)
        writer.close()
        document = {
            "schema": SCHEMA,
            "settings": settings,
            "sha256": file_digest(folder / TENSORS),
            "values": state.values,
            "generators": generators,
        }
        write_json(folder / STATE, document)


def read_state(scratch: Path, settings: Mapping[str, object], warn: Callable[[str], None]) -> State | None:
    """Returns the checkpoint in `scratch` and restores the random generators; None, with a warning, if it cannot be used."""
    folder = scratch / FOLDER
    put_back(folder)
    for leftover in scratch.glob(f".{FOLDER}.*"):  # left by a kill while writing
        shutil.rmtree(leftover)
    if not folder.exists():
        return None
    try:
        document = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or document["settings"] != json.loads(json.dumps(settings)):
            warn(f"{folder}: this training checkpoint has other settings and is not used")
            return None
        if file_digest(folder / TENSORS) != document["sha256"]:
            raise ValueError(f"the sha256 of {TENSORS} is not the one in {STATE}")
        tensors = stored_in(folder / TENSORS)
        _restore_generators(tensors, document["generators"])
        return State({name: value for name, value in tensors.items() if not name.startswith("generator.")}, document["values"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        warn(f"{folder}: the training checkpoint is damaged and not used; training starts over ({error})")
        return None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch, numpy and Python, and restores their state afterwards."""
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


def weights_digest(model: nn.Module, objective: nn.Module | None) -> str:
    """Returns the sha256 (hex) of all parameters, and of the buffers of the model.

    An objective may have a buffer in one process that several have not, for answers of its teacher.
    """
    total = hashlib.sha256()
    own = {} if objective is None else {f"objective.{name}": value for name, value in objective.named_parameters()}
    for name, value in {**model.state_dict(), **own}.items():
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def rows_digest(rows: Sequence[Row], labels: NDArray[Any]) -> str:
    """Returns the sha256 (hex) of training rows and their labels."""
    total = hashlib.sha256(np.ascontiguousarray(labels).tobytes())
    for row in rows:
        plain = row.tobytes() if isinstance(row, np.ndarray) else row
        total.update(plain if isinstance(plain, bytes) else repr(plain).encode("utf-8", "surrogatepass"))
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


def _plain(state: Mapping[str, object]) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state.items()}
