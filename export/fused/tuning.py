"""The fastest tile of an int8 GEMM on this GPU: measured once for each size, and cached.

The file `$XDG_CACHE_HOME/compress/tiles-<digest>.json` holds the tiles of one GPU and one set of versions: the digest is of the name and
the capability of the device, of the versions of torch, the Triton language and CUDA, and of the sources of the kernels. What any of them
changes is measured again. A file that cannot be read counts as none, and is written anew.

A size is rows x outputs x inputs with what ends the GEMM; rows count as the next power of two, so that a handful of measurements serves all
batches. No tile changes a bit of the outputs. Tiles that a GPU has no memory for are left out there.

Left out: tiles of attention, whose choice would change bits, and of the blocks of a sparse weight, whose side is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from export.kernels import activation_codes, epilogue, gemm, rounding
from export.kernels.activation_codes import METHOD
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import TILES, Tile
from export.kernels.launch import Launch, power_of_two

CANDIDATES = (
    *TILES,
    Tile(16, 128, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 64, 128, 4, 3),
    Tile(128, 128, 64, 8, 4),
)
"""Tiles to try."""
WIDE = (
    Tile(64, 256, 128, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 128, 8, 3),
    Tile(256, 128, 64, 8, 4),
    Tile(256, 128, 128, 8, 3),
    Tile(128, 128, 128, 8, 3, True),
    Tile(128, 128, 64, 8, 4, True),
    Tile(64, 64, 128, 4, 3, persistent=True),
    Tile(128, 128, 128, 8, 3, persistent=True),
)
"""More tiles to try from capability 9.0 on: sums fit into the registers of four warps there, below they spill.

Tiles with two passes take at most 128 registers and less than half of the shared memory, so that two programs share a multiprocessor:
one multiplies while the other ends. Persistent programs copy the next tile while they end one; wider ones spill on capability 100.
"""
SOURCES = (gemm, epilogue, activation_codes, rounding)
Measure = Callable[[Launch], float]
"""Returns how long a launch takes, in any unit."""


class Tuner:
    """Chooses tiles.

    Args:
        path: The file that remembers them.
        measure: Times a launch.
        candidates: What is tried.
    """

    def __init__(self, path: Path, measure: Measure, candidates: Sequence[Tile] = CANDIDATES) -> None:
        self._path, self._measure, self._candidates = path, measure, tuple(candidates)
        self._known = remembered(path)

    def __call__(self, codes_NI: Tensor, weight: Int8Weight, output: Output) -> Tile:
        """Returns the tile for codes int8 `[N, I]`; measures where this size is new.

        Raises:
            RuntimeError: No tile runs on this GPU.
        """
        size = size_of(codes_NI, weight, output)
        if size not in self._known:
            self._known[size] = self._fastest(codes_NI, weight, output, size)
            self._known = remember(self._path, self._known)
        return self._known[size]

    def _fastest(self, codes_NI: Tensor, weight: Int8Weight, output: Output, size: str) -> Tile:
        out_NO = torch.empty(len(codes_NI), len(weight.codes), dtype=output.stored, device=codes_NI.device)
        times: dict[Tile, float] = {}
        for tile in self._candidates:
            try:
                times[tile] = self._measure(gemm.launch(codes_NI, 1.0, weight, output, out_NO, tile))
            except OutOfResources:
                continue
        if not times:
            raise RuntimeError(f"no tile of an int8 GEMM of {size} runs on this GPU")
        return min(times, key=lambda tile: times[tile])


def size_of(codes_NI: Tensor, weight: Int8Weight, output: Output) -> str:
    """Returns the size that a tile is remembered for."""
    outputs, inputs = weight.codes.shape
    stored = str(output.stored).removeprefix("torch.")
    method = "" if output.method == METHOD else f" {output.method}"
    return f"{power_of_two(len(codes_NI))}x{outputs}x{inputs} {output.activation} {stored}{method}"


def facts(device: torch.device) -> dict[str, str]:
    """Returns the key that the tiles of a GPU are cached under."""
    digest = hashlib.sha256(b"".join(Path(str(module.__file__)).read_bytes() for module in SOURCES)).hexdigest()
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "torch_version": torch.__version__,
        "triton_version": triton.__version__,
        "cuda_version": str(torch.version.cuda),
        "sources": digest[:16],
    }


def cache_file(machine: Mapping[str, str]) -> Path:
    """Returns the path of the file for what `facts` gave."""
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:12]
    home = os.environ.get("XDG_CACHE_HOME", "")  # empty counts as absent
    return (Path(home) if home else Path.home() / ".cache") / "compress" / f"tiles-{digest}.json"


def remembered(path: Path) -> dict[str, Tile]:
    """Returns the tiles of a file by size; none where it cannot be read."""
    try:
        tiles = json.loads(path.read_text(encoding="utf-8")).items()
        return {
            size: Tile(int(rows), int(outputs), int(inputs), int(warps), int(stages), bool(halves), bool(persistent))
            for size, (rows, outputs, inputs, warps, stages, halves, persistent) in tiles
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def remember(path: Path, known: Mapping[str, Tile]) -> dict[str, Tile]:
    """Writes tiles next to those that another process has written since; returns all of them. Where it cannot be written, warns."""
    every = {**remembered(path), **known}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
            json.dump({size: astuple(tile) for size, tile in sorted(every.items())}, file, indent=1)
        Path(file.name).replace(path)
    except OSError as error:
        warnings.warn(f"{path}: tiles cannot be remembered ({error}); every process measures them anew", stacklevel=2)
    return every


def on_gpu(launch: Launch) -> float:
    """Returns the median time of a launch on the GPU, in milliseconds."""
    return work_on_gpu(launch.run)


def work_on_gpu(work: Callable[[], object]) -> float:
    """Returns the median time of some launches on the GPU, in milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=40, return_mode="median"))


def candidates(device: torch.device) -> tuple[Tile, ...]:
    """Returns the tiles to try on a device."""
    wide = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (*CANDIDATES, *WIDE) if wide else CANDIDATES


def tuner(device: torch.device) -> Tuner:
    """Returns the tuner of a GPU."""
    return Tuner(cache_file(facts(device)), on_gpu, candidates(device))
