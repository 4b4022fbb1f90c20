"""Cache of the counts of `compress plan` in the user's cache folder, so that the next plan of a recipe loads neither data nor torch.

The key is a digest of everything that was read: the recipe; size, times and place of every file of its data, models and teachers, of the
finished stages in the run folder and of this package; what is installed; processor and GPUs. Errors are never kept. Times, memory and room
are not stored: they follow from it, from the recorded runs and from the machine at that moment. What a store of artifacts holds can
change at any moment, so the counts of a recipe with a store are not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TypedDict

from foundation.machine.cached import read_cached, write_cached
from foundation.machine.environment import cache_folder, hardware, versions

PACKAGE = Path(__file__).resolve().parents[2]
CODE = ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo")
SETTINGS = ("COMPRESS_", "HF_", "TRANSFORMERS_")
"""Beginnings of environment variables that decide what is read."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
MOST_FILES = 50_000
"""Files that are looked at; the plan of a recipe with more is not kept, as looking would take as long."""


class CountedStep(TypedDict):
    """What was counted of a step."""

    id: str
    stage: str
    parameters: int | None
    flops: int | None
    disk_bytes: int
    scratch_bytes: int
    """Disk space that it takes besides while it runs."""
    memory_bytes: int
    parts: dict[str, float]
    """Amounts of its parts (`compress.run.expected`)."""
    cached: bool
    """Whether it will not run."""
    stored: bool
    """Whether its artifact will be fetched from the store."""
    reuses: bool
    """Whether it will take parts from earlier runs."""
    note: str
    """The end of its line."""


class Facts(TypedDict):
    """What was counted of a recipe; JSON types."""

    above: list[str]
    """Lines above the table."""
    steps: list[CountedStep]
    below: list[str]
    """Lines below it."""
    threads: int


def remembered(recipe: Mapping[str, object], folder: Path, count: Callable[[], Facts]) -> Facts:
    """Returns what `count` returns, from the cache folder if nothing that it depends on has changed.

    Args:
        recipe: The recipe as plain data, with all defaults.
        folder: The run folder.
        count: Counts it; its errors are the caller's.
    """
    states = list(islice(_states(recipe, folder), MOST_FILES + 1))
    if len(states) > MOST_FILES:
        return count()
    settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    given = [recipe, str(folder.absolute()), states, settings, versions(), hardware()]
    file = cache_folder() / "plans" / f"{hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()}.json"
    counted: Facts | None = read_cached(file)
    if counted is None:
        counted = count()
        write_cached(file, counted)  # a folder that cannot be written: counted every time
    return counted


def _states(recipe: Mapping[str, object], folder: Path) -> Iterator[tuple[object, ...]]:
    """Yields the states of all files that a plan reads."""
    for text in dict.fromkeys(_texts(recipe)):
        for path in _places(text):
            yield from _state(path)
    stages = (folder / "stages").resolve()
    for entry in sorted(os.scandir(stages), key=lambda entry: entry.name) if stages.is_dir() else ():
        yield (entry.name,)
        yield from _state(Path(entry.path) / "manifest.json")
    for name in CODE:
        for file in sorted((PACKAGE / name).rglob("*.py")):
            yield from _state(file)
    for place in sorted({place for place in sys.path if place.endswith("site-packages") and Path(place).is_dir()}):
        yield place, Path(place).stat().st_mtime_ns  # which a library that is installed or removed changes


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _places(text: str) -> Iterator[Path]:
    """Yields possible places of a recipe's text on this machine: as a path, or as a model or data set in the Hub's cache."""
    try:
        path = Path(text).expanduser()
        if path.exists():
            yield path
    except (OSError, ValueError, RuntimeError):  # no file can have this path
        return
    if HUB_ID.fullmatch(text):
        home, hub = os.environ.get("HF_HOME"), os.environ.get("HF_HUB_CACHE")
        cache = Path(hub) if hub else (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
        for kind in ("models", "datasets"):
            kept = cache / f"{kind}--{text.replace('/', '--')}"
            if kept.is_dir():
                yield kept


def _state(path: Path) -> Iterator[tuple[object, ...]]:
    """Yields name, size and times of a file, or of all files in a folder."""
    if path.is_dir():
        for folder, _, names in os.walk(path, followlinks=True):
            for name in sorted(names):
                yield from _state(Path(folder, name))
        return
    try:
        found = path.stat()
    except OSError:
        yield str(path), None
        return
    yield str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
