"""Opens the file of a plan and answers batches: what the engine and the server both do.

On a GPU the passes are recorded (`graphs`) and the tiles measured (`tuning`); in the interpreter the pass runs as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from export.fused.forward import Encoder
from export.fused.graphs import Graphs, Record, Size, record_on_gpu, sizes_of
from export.fused.layers import Probe
from export.fused.plan import Plan, read_plan
from export.fused.rows import Rows, images, pack
from export.fused.tuning import tuner
from foundation.core.arrays import Features

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def device_here(ordinal: int | None = None) -> str:
    """Returns the device that a served model runs on.

    Args:
        ordinal: Number of the GPU; None: the current one of this thread.

    Raises:
        RuntimeError: There is no GPU, and kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no NVIDIA GPU; start the container with --gpus all")
    return f"cuda:{torch.cuda.current_device() if ordinal is None else ordinal}"


class Runner:
    """A plan that answers.

    Args:
        path: What `export.fused.plan.write_plan` wrote.
        device: cuda, or cpu in a process that interprets kernels.
        float_precision: fp32 or fp16, of what is float.
        batch_sizes: Sequences that passes are recorded for.
        lengths: Tokens of the padded rows that it will be given.
        record: Records a pass; None: of a GPU as CUDA graphs, of the interpreter not at all.

    Raises:
        InputError: The file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        float_precision: str,
        batch_sizes: Sequence[int],
        lengths: Sequence[int],
        record: Record | None = None,
    ) -> None:
        self.device, self.float_precision = torch.device(device), float_precision
        plan, on_gpu = read_plan(path), self.device.type == "cuda"
        self._encoder = Encoder(plan, self.device, DTYPES[float_precision], tuner(self.device) if on_gpu else None)
        record = record_on_gpu if record is None and on_gpu else record
        within = [min(length, plan.longest) for length in lengths] or [plan.longest]
        sizes = sizes_of(batch_sizes, within) if plan.patches is None else tuple(Size(plan.longest * rows, rows) for rows in batch_sizes)
        self._graphs = None if record is None else Graphs(self._encoder.forward, sizes, self.device, record)

    @property
    def plan(self) -> Plan:
        """The plan, on the device."""
        return self._encoder.plan

    @property
    def provider(self) -> str:
        """Library that runs the kernels, and its version."""
        return f"triton {triton.__version__}" if self.device.type == "cuda" else "triton interpreter"

    def predict(self, features: Features) -> NDArray[np.float32]:
        """Returns logits float32 [n, C] of padded rows; see `export.fused.rows.pack`.

        Raises:
            InputError: A row is no row of this model.
        """
        with self._on_device(), torch.inference_mode():
            logits: NDArray[np.float32] = self._answered(self._packed(features)).cpu().numpy()
        return logits.copy()

    def prepare(self) -> None:
        """Compiles kernels, measures tiles and records all passes; without recordings it runs one."""
        patches, row = self.plan.patches, {"input_ids": np.zeros((1, 1), np.int64)}
        if patches is not None:
            row = {"pixel_values": np.zeros((1, patches.channels, patches.height, patches.width), np.float32)}
        with self._on_device(), torch.inference_mode():
            if self._graphs is None:
                self._encoder.forward(self._packed(row).to(self.device))
            else:
                self._graphs.prepare(self._packed(row))

    def probe(self, features: Features) -> dict[str, Probe]:
        """Returns the inputs and products of every int8 layer, by its path."""
        with self._on_device(), torch.inference_mode():
            return self._encoder.probe(self._packed(features).to(self.device))[1]

    def _on_device(self) -> AbstractContextManager[object]:
        """The Triton language launches on the current device, wherever its tensors are."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _packed(self, features: Features) -> Rows:
        patches = self.plan.patches
        if patches is None:
            return pack(features, self._encoder.limits)
        return images(features, (patches.channels, patches.height, patches.width), self.plan.longest)

    def _answered(self, rows: Rows) -> Tensor:
        return self._encoder.forward(rows.to(self.device)) if self._graphs is None else self._graphs(rows)
