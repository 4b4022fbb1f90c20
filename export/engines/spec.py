"""The interface of engines: build requests, specs to open one, and the methods of an open engine.

Each engine is a file of this folder, called as its row in `foundation.core.engines`; `export.engines.module` says what the file offers. A
spec is plain data, so that it can travel to the process that the engine runs in (`export.engines.worker`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from foundation.core.arrays import Array, Features
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.core.engines import REFERENCE, EngineName, device_of
from foundation.core.speculation import Speculation

if TYPE_CHECKING:  # every engine's process reads this file, and none of them a recipe: pydantic takes longer to import than the rest
    from export.half_graphs import HalfGraph
    from foundation.artifacts import exported
    from foundation.core.target import Target
    from foundation.models.folder import Checkpoint

"""Result of `Preprocessor.encode`: int64 [n, L] each, or `pixel_values` float32 [n, C, H, W]."""


Logits = NDArray[np.float32]


DYNAMIC_GRAPH = "model_dynamic.onnx"
"""Beside `model.onnx`: the graph of dynamic int8 that computes the scale of each token itself."""
NO_BLOCKS = "it does not round activations to int8 in the blocks of int4 weights (w4a8-block); onnxruntime_decoder does"


@dataclass(frozen=True)
class EngineSpec:
    """How to open one engine. All of it is plain data."""

    engine: EngineName
    mode: str
    """eager or compiled (torch), dynamic or static (the others)."""
    precision: str
    float_precision: str
    """Precision of the float part if `precision` is int8; equal to `precision` otherwise."""
    device: str
    threads: int
    path: str
    """Model file; for torch the checkpoint folder."""
    folder: str
    """Folder with preprocess.json and tokenizer.json."""
    batch_sizes: tuple[int, ...] = (1,)
    """Batch sizes that a static engine is compiled for, ascending."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Settings of the engine that its entry in export.json holds."""
    towers: Mapping[str, str] = field(default_factory=dict)
    """Model file of each tower by its name, if the model has two; `path` is the first one's. Else empty."""
    speculation: Speculation | None = None
    """Source of proposed tokens for an engine that answers prompts; None: no proposals."""

    @property
    def labels(self) -> dict[str, str]:
        """Label of its rows in the report and of its error messages."""
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

    def message(self) -> dict[str, object]:
        """Returns the spec as JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> EngineSpec:
        """The inverse of `message`."""
        speculation = None if message["speculation"] is None else Speculation.from_message(message["speculation"])
        return cls(**{**message, "batch_sizes": tuple(message["batch_sizes"]), "speculation": speculation})


class Placement(TypedDict):
    """The device of an engine, read back from the engine."""

    device: str
    """cpu or cuda."""
    provider: str
    """Backend that executes the graph there, as its library names it."""
    float_precision: str
    """fp32, bf16 or fp16: what the layers that are not quantized run in. Where the graph fixes all types (ONNX Runtime, TensorRT), the type
    of the logits."""


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
            int8, fp32, bf16 ... by node name; a node that is not in the engine's graph is absent.
        """

    def placement(self) -> Placement:
        """Returns the engine's device and float type as it reports them; read after the first prediction."""


def last_tokens_of(engine: Generates, features: Features) -> None:
    """Lets an engine read rows without their last tokens as prompts, and choose these (`ReadsPrompts.read`)."""
    ids = np.asarray(features["input_ids"], np.int32)
    engine.generate([row[: max(1, len(row) - 1)] for row in ids], Decoding(max_tokens=1, ignore_end=True))


@runtime_checkable
class Generates(Protocol):
    """An engine that answers prompts."""

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answer to each prompt, token ids int32 [length]; as many prompts run at once as the engine can.

        Args:
            prompts: Token ids.
            decoding: How tokens are chosen.
            on_tokens: Called with tokens as they come; not called by a search with beams.
        """


@runtime_checkable
class ReadsPrompts(Protocol):
    """An engine that is timed while it reads prompts as it does when it is served: logits of the last token alone, in the same pipeline."""

    def read(self, features: Features) -> None:
        """Reads one batch of rows but for their last tokens, and chooses these.

        Args:
            features: As for `predict`.
        """


@runtime_checkable
class Reports(Protocol):
    """An engine that reports what decides its precision."""

    def reported(self) -> dict[str, str]:
        """Returns settings of the compiled model, and what products do to their inputs, by name."""


@runtime_checkable
class Probed(Protocol):
    """An engine that shows what is inside its graph."""

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, Array]:
        """Returns tensors inside the graph by their ONNX names, computed by the engine with the settings it serves with."""


@dataclass(frozen=True)
class BuildRequest:
    """A build request to one engine: one checkpoint in one precision."""

    engine: EngineName
    checkpoint: Checkpoint
    model: Path
    """Its ONNX graph."""
    root: Path
    """Folder that paths in entries are relative to."""
    folder: Path
    """Existing folder of this build."""
    shared: Path
    """Folder of the fp32 build, whose files a bf16 build is made of; else `folder`."""
    precision: str
    float_precision: str
    """Precision of the float part."""
    bf16_float_part: bool
    """Whether to offer a mode whose float part is bf16, too; of engines that compute it from the files of fp32."""
    buckets: tuple[int, ...]
    """Sequence lengths (tokens) that rows are padded to; () for images."""
    target: Target
    log: Callable[[str], None]
    """Takes one line for each thing worth telling."""
    fp16_float_part: bool = False
    """Whether to offer a mode whose float part is fp16, too; of engines that compute it from the files of fp32."""
    half_graph: HalfGraph | None = None
    """For engines whose graph gives the float types: the graph whose float part is in 16 bits; None if it is all fp32."""
    kv_cache: str = "float"
    """Precision of the cache of keys and values of engines that generate: float (the precision that they compute in), fp16 or int8."""
    batch_invariant: bool = False
    """Whether an answer may not depend on the answers that are written with it; of engines that can be built so."""

    def entry(self, mode: str, files: Sequence[Path] = (), **values: Any) -> exported.Engine:
        """Returns the engine's entry for `engines` of export.json; `values` replace or add to what every engine has."""
        from export.stored_weights import integer_weights

        present = [file for file in files if file.exists()]
        given = {
            "float_precision": self.float_precision,
            "file": str(present[0].relative_to(self.root)) if present else None,
            "size_bytes": sum(file.stat().st_size for file in present),
            "integer_weights": integer_weights(present),
        }
        return engine_entry(self.engine, mode, **{**given, **values})


def engine_entry(engine: EngineName, mode: str, **values: Any) -> exported.Engine:
    """Returns an entry for `engines` of export.json: what every engine has, with `values` replacing or adding to it."""
    from foundation.artifacts import exported

    entry: dict[str, object] = {
        "engine": engine,
        "mode": mode,
        "float_precision": "fp32",
        "file": None,
        "runnable": True,
        "reason": None,
        "size_bytes": None,
        "int8_share": None,
        "int8_share_all": None,
        "int4_share": None,
        "integer_weights": None,
        "int8_share_reason": None,
        "layers": [],
        "metrics": {},
        "n": 0,
        "predictions": None,
    }
    return exported.Engine.model_validate({**entry, **values})


def spec_of(root: Path, build: exported.Build, engine: exported.Engine, target: Target) -> EngineSpec:
    """Returns the spec of one engine of export.json.

    Args:
        root: Folder of export.json.
        build: Its entry in `builds`.
        engine: Its entry in `engines` of the build: one with a file, so not torch.
        target: Gives device, threads and batch sizes.
    """
    return EngineSpec(
        engine=engine.engine,
        mode=engine.mode,
        precision=build.precision,
        float_precision=engine.float_precision or build.float_precision,
        device=device_of(engine.engine, target.device),
        threads=target.num_threads,
        path=str((root / str(engine.file)).resolve()),
        folder=str((root / build.folder).resolve()),
        batch_sizes=compiled_batch_sizes(target),
        properties=engine.properties,
        towers={name: str((root / file).resolve()) for name, file in engine.towers.items()},
    )


def proposed_to(spec: EngineSpec, root: Path, engine: exported.Engine) -> EngineSpec:
    """Returns the spec of an engine of export.json, with what proposes tokens to it.

    Args:
        spec: What `spec_of` gave.
        root: Folder of export.json.
        engine: Its entry, with `speculation`.
    """
    told = engine.speculation
    assert told is not None, "something proposes tokens"
    draft = None if told["file"] is None else str((root / told["file"]).resolve())
    return replace(spec, speculation=Speculation(told["tokens"], draft, told["properties"]))


def torch_spec(checkpoint: Checkpoint, folder: Path, precision: str, target: Target, mode: str = "eager") -> EngineSpec:
    """Returns the spec of a checkpoint in torch.

    Args:
        checkpoint: Checkpoint folder.
        folder: Folder with preprocess.json.
        precision: fp32, fp16 or bf16; int8 for a quantized checkpoint as it is. A quantized checkpoint in fp32 runs on its grid weights.
        target: Gives device, threads and batch sizes.
        mode: eager or compiled.
    """
    rest = "fp32" if precision == "int8" else precision
    batch_sizes = compiled_batch_sizes(target)
    paths = str(checkpoint.folder.resolve()), str(folder.resolve())
    return EngineSpec(REFERENCE, mode, precision, rest, target.device, target.num_threads, *paths, batch_sizes)


def compiled_batch_sizes(target: Target) -> tuple[int, ...]:
    """Returns the batch sizes of a static engine: the target's, and 1."""
    return tuple(sorted({1, *target.batch_sizes}))
