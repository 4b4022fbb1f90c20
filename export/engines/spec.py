"""What an engine is to the rest of the project: a spec that says how to open it, and an object that predicts.

A spec is plain data, so that it can travel to the process that the engine runs in (`export.engines.worker`). `open_engine` is the list of
all engines that run on this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # every engine's process reads this file, and none of them a recipe: pydantic takes longer to import than the rest
    from compress.core.target import EngineName, Target

Features = Mapping[str, NDArray[Any]]
"""What `Preprocessor.encode` gives: int64 [n, L] each, or `pixel_values` float32 [n, C, H, W]."""


Logits = NDArray[np.float32]


@dataclass(frozen=True)
class EngineSpec:
    """How to open one engine. All of it is plain data."""

    engine: EngineName
    mode: str
    """eager or compiled (torch), dynamic or static (the others)."""
    precision: str
    float_precision: str
    """What runs in float where `precision` is int8; equal to `precision` otherwise."""
    device: str
    threads: int
    path: str
    """Model file; for torch the checkpoint folder."""
    folder: str
    """Folder with preprocess.json and tokenizer.json."""
    batch_sizes: tuple[int, ...] = (1,)
    """Batch sizes that a static engine is compiled for, ascending."""

    @property
    def labels(self) -> dict[str, str]:
        """What its rows in the report and its error messages are marked with."""
        names = ("engine", "mode", "precision", "float_precision", "device")
        return {name: str(getattr(self, name)) for name in names}

    @property
    def command(self) -> list[str]:
        """Command line of the process it runs in; -P keeps the working folder off the import path."""
        return [sys.executable, "-P", "-m", "export.engines.worker"]

    @property
    def evaluation_batch(self) -> int:
        """Rows per batch in evaluation: the largest that is measured and served."""
        return self.batch_sizes[-1]

    def message(self) -> dict[str, Any]:
        """Returns the spec as JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> EngineSpec:
        """Reads what `message` gave."""
        return cls(**{**message, "batch_sizes": tuple(message["batch_sizes"])})


class Engine(Protocol):
    """An open engine."""

    def predict(self, features: Features) -> Logits:
        """Returns the logits of one batch, float32 [n, C], or [n, L, V]."""

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision that each GEMM node of the ONNX graph runs in, read off the engine's own graph.

        Args:
            gemms: Names of the nodes.
            batch: Rows.
            sequence: Tokens; None for images.

        Returns:
            int8, fp32, bf16 ... by node name; a node that the engine's graph does not tell of is absent.
        """


@runtime_checkable
class Probed(Protocol):
    """An engine that shows what is inside its graph."""

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, NDArray[Any]]:
        """Returns tensors inside the graph by their ONNX names, computed by the engine with the settings it serves with."""


def spec_of(root: Path, build: Mapping[str, Any], engine: Mapping[str, Any], target: Target) -> EngineSpec:
    """Returns the spec of one engine of export.json.

    Args:
        root: Folder that export.json lies in.
        build: Its entry in `builds`.
        engine: Its entry in `engines` of the build: one with a file, so not torch.
        target: Gives device, threads and batch sizes.
    """
    return EngineSpec(
        engine=cast("EngineName", engine["engine"]),
        mode=engine["mode"],
        precision=build["precision"],
        float_precision=engine.get("float_precision", build["float_precision"]),
        device="cpu" if engine["engine"] == "openvino" else target.device,
        threads=target.num_threads,
        path=str((root / engine["file"]).resolve()),
        folder=str((root / build["folder"]).resolve()),
        batch_sizes=compiled_batch_sizes(target),
    )


def torch_spec(checkpoint: Path, folder: Path, precision: str, target: Target, mode: str = "eager") -> EngineSpec:
    """Returns the spec of a checkpoint in torch.

    Args:
        checkpoint: Checkpoint folder.
        folder: Folder with preprocess.json.
        precision: fp32 or bf16; int8 for a quantized checkpoint as it is. A quantized checkpoint in fp32 runs on its grid weights.
        target: Gives device, threads and batch sizes.
        mode: eager or compiled.
    """
    rest = "fp32" if precision == "int8" else precision
    batch_sizes = compiled_batch_sizes(target)
    paths = str(checkpoint.resolve()), str(folder.resolve())
    return EngineSpec("torch", mode, precision, rest, target.device, target.num_threads, *paths, batch_sizes)


def compiled_batch_sizes(target: Target) -> tuple[int, ...]:
    """Returns the batch sizes of a static engine: those of the target, and 1."""
    return tuple(sorted({1, *target.batch_sizes}))
