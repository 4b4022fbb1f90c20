"""torch as an engine: the baseline that speed-ups are measured against, and the reference that other engines have to agree with.

    eager      the checkpoint as `compress.models.checkpoint.load` gives it
    compiled   the same through torch.compile, once for each shape; it needs a C++ compiler

A quantized checkpoint asked for in fp32 or bf16 runs as the float model on its grid weights: its int8 layers are not put in place.

Left out: CUDA graphs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.core.errors import InputError
from compress.models.checkpoint import load
from compress.models.config import read_config
from compress.models.conv1d import with_linears
from compress.models.forward import forward
from compress.models.library import quiet
from compress.models.shapes import auto_class
from compress.schemes.checkpoint import scheme_of
from compress.standalone.preprocess import Preprocessor
from export.engines.spec import BuildRequest, EngineSpec, Features, Logits, Placement

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler for the CPU."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def refusal(precision: str, model: Path) -> str | None:
    """Returns None: torch runs every checkpoint."""
    return None


def absence(device: str) -> str | None:
    """Returns in one line why torch cannot run on a device of this machine; None where it can."""
    return None if device == "cpu" or torch.cuda.is_available() else "torch finds no NVIDIA GPU that it can use"


def build(request: BuildRequest) -> Iterator[dict[str, Any]]:
    """Builds nothing, as it runs the checkpoint itself; yields the eager mode."""
    size = sum(file.stat().st_size for file in request.checkpoint.glob("*.safetensors"))
    yield request.entry("eager", size_bytes=size)


def open_engine(spec: EngineSpec) -> Torch:
    """Opens a checkpoint."""
    return Torch(spec)


class Torch:
    """An engine from a checkpoint folder."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._dtype = DTYPES[spec.float_precision]
        self._device = torch.device(spec.device)
        folder = Path(spec.path)
        if spec.precision == "int8":
            self._model = load(folder, self._device, self._dtype)
        else:
            self._model = load_float(folder, Path(spec.folder)).to(self._device, self._dtype)
        if spec.mode == "compiled":
            if not can_compile():
                raise InputError("torch compiled: no C++ compiler is on PATH; install g++, or leave this mode out")
            self._model = torch.compile(self._model, dynamic=False)  # type: ignore[assignment]

    def predict(self, features: Features) -> Logits:
        """Returns logits float32 [n, C], or [n, L, V]."""
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in features.items()}
            if "pixel_values" in tensors:
                tensors["pixel_values"] = tensors["pixel_values"].to(self._dtype)
            logits: Logits = forward(self._model, tensors).cpu().numpy()
        return logits

    def placement(self) -> Placement:
        """Returns the device and the type of the float weights."""
        weight = next(weight for weight in self._model.parameters() if weight.is_floating_point())
        precision = next(name for name, dtype in DTYPES.items() if dtype == weight.dtype)
        return {"device": weight.device.type, "provider": f"torch {weight.device.type}", "float_precision": precision}

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns nothing: eager torch has no graph of its own that could be read."""
        return {}


def load_float(checkpoint: Path, preprocess: Path) -> nn.Module:
    """Loads a checkpoint as a float32 model with sdpa attention; where it is quantized, its grid weights without the int8 layers."""
    if scheme_of(checkpoint) is None:
        return load(checkpoint)
    task: Any = Preprocessor.load(preprocess).task
    config = read_config(checkpoint, "checkpoint")
    with quiet():
        model = auto_class(task, config).from_pretrained(
            checkpoint, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    floating: nn.Module = with_linears(model).eval()
    return floating
