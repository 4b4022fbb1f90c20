"""The engine `torch_kernels` in the server: plan.safetensors on the GPU of its process. Copied there with the modules that it imports.

Needs torch, the Triton language, safetensors and numpy. With TRITON_INTERPRET=1 the kernels run in the interpreter, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from export.fused.runner import Runner

PLAN = "plan.safetensors"


class Engine:
    """A plan that answers, with its passes recorded.

    Args:
        folder: Holds the plan.
        mode: packed.
        batch_sizes: Rows that passes are recorded for.
        properties: `float_precision`: fp32 or fp16; `lengths`: tokens of padded rows, with spaces between them.

    Raises:
        RuntimeError: There is no GPU.
    """

    def __init__(self, folder: Path, mode: str, batch_sizes: Sequence[int], properties: Mapping[str, str]) -> None:
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        if not interprets and not torch.cuda.is_available():
            raise RuntimeError("torch finds no NVIDIA GPU; start the container with --gpus all")
        device = "cpu" if interprets else f"cuda:{torch.cuda.current_device()}"
        lengths = [int(length) for length in properties["lengths"].split()]
        self._runner = Runner(folder / PLAN, device, properties["float_precision"], batch_sizes, lengths)

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compiles kernels, measures tiles and records the passes of every size, which for rows without padding is not their shape."""
        self._runner.prepare()

    def predict(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, float32 [n, C], of rows of the same shape."""
        return self._runner.predict(features)
