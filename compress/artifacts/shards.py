"""Weights that stay in their files: safetensors read and written through memory maps.

A safetensors file is 8 bytes (the length of the header), the header (JSON: dtype, shape and place of every tensor), and the tensors one
after the other. `StoredWeights` gives views of mapped files, `ShardWriter` tensors that are files being written. Neither takes memory of
the process beyond page tables: the pages belong to the file, and the kernel drops or writes them back as it needs room. In the terms of
/proc/self/status they are RssFile, not RssAnon. The maps of `StoredWeights` are read-only: who writes to such a tensor ends the process.

The header of a file that grows is not known when its first tensor is written, so room for the header of all tensors is left free; spaces
at its end are allowed by the format. Tensors stand without gaps, as the format wants them, each at a multiple of the size of its values:
where the one before ends elsewhere, a new shard is begun.

Left out: sparse and compressed storage, big-endian machines.
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

from compress.artifacts.artifact import write_json
from compress.artifacts.safetensors import weight_files
from compress.core.errors import InputError

SHARD_BYTES = 2 * 10**9
ENTRY_BYTES = 200  # of the header for one tensor, its name left out
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
    """Returns a part of a file as a tensor; the map is closed with the last tensor that shares it.

    Args:
        path: A file that reaches that far.
        offset: First byte.
        shape: Of the tensor.
        dtype: Of the tensor.
        writable: What is written into the tensor is written into the file. Otherwise writing to it ends the process.
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
    """Gives a file room for so many bytes from an offset on, on the disk and not only in name; makes the file where there is none.

    Raises:
        OSError: The disk is full; a write through a map could not say so.
    """
    with path.open("ab") as stream:
        if size:
            os.posix_fallocate(stream.fileno(), offset, size)


class StoredWeights:
    """The tensors of a model folder, where they lie.

    Args:
        folder: With `model.safetensors`, or shards and their index.
        key: Key path of the folder, for messages.

    Raises:
        InputError: A file is missing or damaged, or holds a type that is not read here.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._places: dict[str, tuple[Path, int, tuple[int, ...], torch.dtype]] = {}
        for file in weight_files(folder, key):
            try:
                self._places |= _places(file)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{key}: {file} is no whole safetensors file ({error}); copy or download it again") from error

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
        """Returns the type of a tensor."""
        return self._places[name][3]

    def __getitem__(self, name: str) -> Tensor:
        """Returns a tensor in its stored type; it must not be written to."""
        path, offset, shape, dtype = self._places[name]
        return mapped(path, offset, shape, dtype)


def _places(file: Path) -> dict[str, tuple[Path, int, tuple[int, ...], torch.dtype]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(int(edge) for edge in entry["shape"]), DTYPES[entry["dtype"]]
        if not 0 <= begin <= end <= size - 8 - length or end - begin != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} lies outside of the file, or is of another size than its shape")
        places[name] = (file, 8 + length + begin, shape, dtype)
    return places


class ShardWriter:
    """Writes a safetensors file, or several with an index, tensor by tensor.

    Args:
        folder: Existing folder.
        names: Names of all tensors that may come: their headers are what room is left for.
        stem: `model` gives model.safetensors, or model-00001-of-00002.safetensors and so on with model.safetensors.index.json.
        limit: Bytes of a shard; a larger tensor has one of its own. None for one file, whose tensors are of one type.
    """

    def __init__(self, folder: Path, names: Iterable[str], stem: str = "model", limit: int | None = SHARD_BYTES) -> None:
        self._folder, self._stem, self._limit = folder, stem, limit
        header = 8 + 100 + sum(len(json.dumps(name)) + ENTRY_BYTES for name in names)
        self._start = header + -header % mmap.ALLOCATIONGRANULARITY
        self._shards: list[dict[str, dict[str, Any]]] = []
        self._used = 0

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor to write to, which is part of the file; its values are undefined.

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
        """Writes a tensor as it is."""
        self.new(name, tensor.shape, tensor.dtype).copy_(tensor)

    def close(self) -> None:
        """Writes the headers, gives the files their names and, where there are several, writes the index."""
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
