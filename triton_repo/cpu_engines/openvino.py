"""OpenVINO in the server: openvino.xml and openvino.bin.

In static mode there is one compiled network for each shape, and rows run in the compiled batch sizes, largest first:

    sizes 1, 8:   11 rows of one bucket -> 8 + 1 + 1 + 1

Batches are not padded, because a padding row costs as much as a real one. The result of a row does not depend on the other rows of its
batch: all compiled shapes give bit-identical rows. So a server that finds its compiled networks in the folder `KEPT` is ready as soon as it
has read those for one row, and reads the larger ones while it answers.

    <kept>/1x128.network     what OpenVINO exports, then 32 bytes: sha256(name, 0, what it exports)

OpenVINO does not notice when the bytes of a network have changed, and would answer wrongly. So each network is hashed just before it is
read, and compiled and written again where it is not the one that was written. It stays mapped: processes share its weights."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # no telemetry

import numpy as np
import openvino

if __package__:
    from foundation.standalone.openvino_request import Request, compiled
else:  # in a repository it is next to this file
    from openvino_request import Request, compiled  # type: ignore[import-not-found, no-redef]

DYNAMIC = ()
KEPT = "KEPT_NETWORKS"
"""The property that names the folder of compiled networks; not one of OpenVINO's."""
DIGEST_BYTES = 32


class Engine:
    """The network, compiled for each shape.

    Args:
        folder: Holds the files.
        mode: static or dynamic.
        batch_sizes: Batch sizes of a static engine; 1 is one of them.
        properties: Compile properties, and `KEPT`.
    """

    def __init__(self, folder: Path, mode: str, batch_sizes: Sequence[int], properties: Mapping[str, str]) -> None:
        self._core, self._file = openvino.Core(), folder / "openvino.xml"
        self._network: Any = None
        self._properties = {name: value for name, value in properties.items() if name != KEPT}
        self._cache = Path(properties[KEPT]) if KEPT in properties else None
        self._static, self._sizes = mode == "static", sorted(batch_sizes, reverse=True)
        self._requests: dict[tuple[int, ...], Request] = {}
        self._mapped: list[np.ndarray] = []
        """The kept networks: their memory is used as long as they answer."""

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compiles for rows of these shapes, (L,) or (C, H, W), in every batch size; see above."""
        sizes = sorted(self._sizes) if self._static else []
        wanted = [(size, *shape) for size in sizes for shape in shapes] or [DYNAMIC]
        single = wanted[: len(shapes)] if self._static and self._cache is not None else []
        now = len(single) if single and all(self._place(shape).exists() for shape in single) else len(wanted)
        self._open(wanted[:now])
        if wanted[now:]:
            threading.Thread(target=self._open, args=(wanted[now:],), name="reading networks", daemon=True).start()

    def _open(self, wanted: Sequence[tuple[int, ...]]) -> None:
        with ThreadPoolExecutor(1) as pool:  # the next ones are hashed while one is read
            for shape, kept in zip(wanted, pool.map(self._whole, wanted), strict=True):
                self._requests[shape] = Request(self._network_of(shape, kept), known=shape != DYNAMIC)

    def predict(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, float32 [n, C], of rows of the same shape."""
        if not self._static:
            return self._request(DYNAMIC).infer(features)
        parts = []
        shape = next(iter(features.values())).shape
        for start, stop in self.spans(shape[0], [size for size in self._sizes if size == 1 or (size, *shape[1:]) in self._requests]):
            part = {name: array[start:stop] for name, array in features.items()}
            parts.append(self._request(next(iter(part.values())).shape).infer(part))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    @staticmethod
    def spans(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Splits rows 0 to n into batch sizes, given largest first."""
        start = 0
        while start < rows:
            size = next(size for size in sizes if size <= rows - start)
            yield start, start + size
            start += size

    def _request(self, shape: tuple[int, ...]) -> Request:
        if shape not in self._requests:
            self._open([shape])
        return self._requests[shape]

    def _network_of(self, shape: tuple[int, ...], exported: np.ndarray | None) -> Any:
        """Returns the compiled network: the one that was kept, or compiled and kept from now on."""
        if exported is not None:
            self._mapped.append(exported)
            return self._core.import_model(openvino.Tensor(exported, shared_memory=True), "CPU", self._properties)
        if self._network is None:
            self._network = self._core.read_model(self._file)
        made = compiled(self._core, self._network, shape, self._properties)
        if self._cache is not None:
            try:
                self._keep(shape, made.export_model().getbuffer())
            except OSError as error:  # the server answers without
                print(f"the compiled network is not kept: {error}", file=sys.stderr, flush=True)
        return made

    def _whole(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns the kept network of a shape, uint8; None where there is none, or not the one that was written."""
        if self._cache is None:
            return None
        place = self._place(shape)
        try:
            with place.open("rb") as stream:
                content = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        except (OSError, ValueError):  # there is none, or it is empty
            return None
        network, noted = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:].tobytes()
        return network if digest(place.name, network) == noted else None

    def _keep(self, shape: tuple[int, ...], network: memoryview) -> None:
        assert self._cache is not None, "asked before"
        place = self._place(shape)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as stream:
                stream.write(network)
                stream.write(digest(place.name, network))
            os.replace(temporary, place)
        finally:  # a part of it would only take space
            temporary.unlink(missing_ok=True)

    def _place(self, shape: tuple[int, ...]) -> Path:
        assert self._cache is not None, "asked before"
        return self._cache / f"{'x'.join(map(str, shape)) or 'dynamic'}.network"


def digest(name: str, network: Any) -> bytes:
    """Returns the cache key of a network."""
    made = hashlib.sha256(name.encode() + b"\0")
    made.update(network)
    return made.digest()
