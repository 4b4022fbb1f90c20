"""The engine `torch_kernels` in the server: plan.safetensors on the GPU of its process. Copied there with the modules that it imports.

Needs torch, the Triton language, safetensors and numpy. With TRITON_INTERPRET=1 the kernels run in the interpreter, on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from export.fused.runner import Runner, device_here

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
        lengths = [int(length) for length in properties["lengths"].split()]
        self._runner = Runner(folder / PLAN, device_here(), properties["float_precision"], batch_sizes, lengths)

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compiles kernels, measures tiles and records the passes of every size, which for rows without padding is not their shape."""
        self._runner.prepare()

    def predict(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, float32 [n, C], of rows of the same shape."""
        return self._runner.predict(features)
