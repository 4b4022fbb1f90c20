"""OpenVINO in the server: openvino.xml and openvino.bin.

In static mode there is one compiled network for each shape, and rows run in the compiled batch sizes, largest first:

    sizes 1, 8:   11 rows of one bucket -> 8 + 1 + 1 + 1

Batches are not padded, because a padding row costs as much as a real one. The result of a row does not depend on the other rows of its
batch: all compiled shapes give bit-identical rows. So a server that finds its compiled networks in CACHE_DIR is ready as soon as it has
read those for one row, and reads the larger ones while it answers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # no telemetry

import numpy as np
import openvino

DYNAMIC = ()
CACHE = "CACHE_DIR"


class Engine:
    """The network, compiled for each shape.

    Args:
        folder: Holds the files.
        mode: static or dynamic.
        batch_sizes: Batch sizes of a static engine; 1 is one of them.
        properties: Compile properties.
    """

    def __init__(self, folder: Path, mode: str, batch_sizes: Sequence[int], properties: Mapping[str, str]) -> None:
        core = openvino.Core()
        self._core, self._network, self._properties = core, core.read_model(folder / "openvino.xml"), properties
        self._static, self._sizes = mode == "static", sorted(batch_sizes, reverse=True)
        self._requests: dict[tuple[int, ...], Any] = {}

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compiles for rows of these shapes, (L,) or (C, H, W), in every batch size; see above."""
        sizes = sorted(self._sizes) if self._static else []
        wanted = [(size, *shape) for size in sizes for shape in shapes] or [DYNAMIC]
        kept = self._properties.get(CACHE)
        now = len(shapes) if self._static and kept is not None and any(Path(kept).glob("*.blob")) else len(wanted)
        self._compile(wanted[:now])
        if wanted[now:]:
            threading.Thread(target=self._compile, args=(wanted[now:],), name="compiling", daemon=True).start()

    def _compile(self, wanted: Sequence[tuple[int, ...]]) -> None:
        for shape in wanted:
            self._request(shape)

    def predict(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, float32 [n, C], of rows of the same shape."""
        if not self._static:
            return self._infer(DYNAMIC, features)
        parts = []
        shape = next(iter(features.values())).shape
        for start, stop in self.spans(shape[0], [size for size in self._sizes if size == 1 or (size, *shape[1:]) in self._requests]):
            part = {name: array[start:stop] for name, array in features.items()}
            parts.append(self._infer(next(iter(part.values())).shape, part))
        return np.concatenate(parts)

    @staticmethod
    def spans(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Splits rows 0 to n into batch sizes, given largest first."""
        start = 0
        while start < rows:
            size = next(size for size in sizes if size <= rows - start)
            yield start, start + size
            start += size

    def _infer(self, shape: tuple[int, ...], features: Mapping[str, np.ndarray]) -> np.ndarray:
        request = self._request(shape)
        request.infer(dict(features), share_inputs=True)
        return np.array(request.get_output_tensor(0).data, dtype=np.float32)

    def _request(self, shape: tuple[int, ...]) -> Any:
        if shape not in self._requests:
            network = self._network
            if shape:
                network = network.clone()
                network.reshape({value.any_name: list(shape) for value in network.inputs})
            self._requests[shape] = self._core.compile_model(network, "CPU", dict(self._properties)).create_infer_request()
        return self._requests[shape]
