"""Reads and writes safetensors files through memory maps, for models larger than memory.

A safetensors file is 8 bytes (the header length), the header (JSON: dtype, shape and offsets of every tensor), and then the tensors.
`StoredWeights` returns read-only views of mapped files; `ShardWriter` returns tensors backed by the file being written. Neither uses
process memory beyond page tables: the pages belong to the file, and the kernel drops them or writes them back as needed (RssFile, not
RssAnon, in /proc/self/status). Writing to a tensor of `StoredWeights` crashes the process.

The final header is not known when the first tensor is written, so the writer reserves space for the header of all tensors; the format
allows trailing spaces in it. The format allows no gaps between tensors, and each must be aligned to its element size: if the previous
tensor ends at an unaligned offset, the writer starts a new shard.

Not supported: sparse and compressed storage, big-endian machines.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import weight_files
from foundation.core.errors import InputError
from foundation.core.files import open_plain
from foundation.core.shown import reason

SHARD_BYTES = 2 * 10**9
ENTRY_BYTES = 200  # reserved in the header for one tensor, without its name
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def mapped(path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype, *, writable: bool = False) -> Tensor:
    """Returns part of a file as a memory-mapped tensor; the map is closed when the last tensor that shares it is freed.

    Args:
        path: An existing file, long enough for the tensor.
        offset: First byte of the tensor.
        shape: Shape of the tensor.
        dtype: Type of the tensor.
        writable: Whether writes go to the file. If False, writing to the tensor crashes the process.
    """
    if not prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset - start + prod(shape) * dtype.itemsize
    with path.open("r+b" if writable else "rb") as stream:
        view = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ, offset=start)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=dtype, count=prod(shape), offset=offset - start).view(tuple(shape))


def allocate(path: Path, offset: int, size: int) -> None:
    """Allocates `size` bytes on disk at `offset` of a file, which is created if missing.

    Raises:
        OSError: The disk is full; writing through a map could not report that.
    """
    with path.open("ab") as stream:
        if size:
            os.posix_fallocate(stream.fileno(), offset, size)


def stored_in(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name, memory-mapped; read-only.

    Raises:
        OSError, ValueError, KeyError, TypeError: The file is missing or damaged, or has a tensor type that is not supported.
    """
    return {name: mapped(*place) for name, place in _places(file).items()}


class StoredWeights:
    """The tensors of a model folder, memory-mapped on access.

    Args:
        folder: Contains `model.safetensors`, or shards and their index.
        key: Key path of the folder in the recipe, for messages.

    Raises:
        InputError: A file is missing or damaged, or has a tensor type that is not supported.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._places: dict[str, tuple[Path, int, tuple[int, ...], torch.dtype]] = {}
        for file in weight_files(folder, key):
            try:
                self._places |= _places(file)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise InputError(
                    key, f"{file} is not a complete safetensors file ({reason(error)})", remedy="copy or download it again"
                ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._places[name][2]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self._places[name][3]

    def __getitem__(self, name: str) -> Tensor:
        """Returns a tensor in its stored dtype; read-only."""
        path, offset, shape, dtype = self._places[name]
        return mapped(path, offset, shape, dtype)


def _places(file: Path) -> dict[str, tuple[Path, int, tuple[int, ...], torch.dtype]]:
    size = file.stat().st_size
    with open_plain(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"header of {length} bytes in a file of {size} bytes")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise ValueError(f"{name} has the shape {shape} and the offsets {begin} and {end}")
        if not 0 <= begin <= end <= size - 8 - length or end - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} lies outside the file, or its size does not match its shape")
        places[name] = (file, 8 + length + begin, shape, dtype)
    return places


class ShardWriter:
    """Writes tensors one by one into a safetensors file, or into several with an index.

    Args:
        folder: Existing folder.
        names: Names of all tensors that may be written; space is reserved for their header entries.
        stem: `model` gives model.safetensors, or model-00001-of-00002.safetensors and so on with model.safetensors.index.json.
        limit: Maximum bytes per shard; a larger tensor gets its own shard. None writes a single file; types of fewer bytes must come last.
    """

    def __init__(self, folder: Path, names: Iterable[str], stem: str = "model", limit: int | None = SHARD_BYTES) -> None:
        self._folder, self._stem, self._limit = folder, stem, limit
        header = 8 + 100 + sum(len(json.dumps(name)) + ENTRY_BYTES for name in names)
        self._start = header + -header % mmap.ALLOCATIONGRANULARITY
        self._shards: list[dict[str, dict[str, Any]]] = []
        self._used = 0

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor whose memory is part of the file.

        Raises:
            OSError: The disk is full.
        """
        size = prod(shape) * dtype.itemsize
        full = self._limit is not None and self._used + size > self._limit
        if not self._shards or (self._used and full) or self._used % dtype.itemsize:
            assert self._limit is not None or not self._shards, (name, dtype, self._used)
            self._shards.append({})
            self._used = 0
        path, offset = self._path(len(self._shards)), self._start + self._used
        self._shards[-1][name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [self._used, self._used + size]}
        self._used += size
        allocate(path, offset, size)
        return mapped(path, offset, shape, dtype, writable=True)

    def copy(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor, keeping its dtype."""
        self.new(name, tensor.shape, tensor.dtype).copy_(tensor)

    def close(self) -> None:
        """Writes the headers, renames the files to their final names and, if there are several, writes the index."""
        count = len(self._shards)
        written: dict[str, str] = {}
        for number, header in enumerate(self._shards, 1):
            path = self._path(number)
            text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
            assert len(text) <= self._start - 8, (len(text), self._start)
            with path.open("r+b") as stream:
                stream.write((self._start - 8).to_bytes(8, "little") + text.ljust(self._start - 8))
            final = f"{self._stem}.safetensors" if count == 1 else f"{self._stem}-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / final)
            written |= dict.fromkeys(header, final)
        if count > 1:
            total = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for header in self._shards for entry in header.values())
            index = {"metadata": {"total_size": total}, "weight_map": written}
            write_json(self._folder / f"{self._stem}.safetensors.index.json", index)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:05d}.part"
