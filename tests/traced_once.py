"""Graphs that were traced before, for all tests that export through `write_graphs`.

The exporter of torch takes seconds for a graph, and writes the same bytes for the same checkpoint (`test_onnx.test_same_bytes_twice`).
Tests export the same tiny checkpoints again and again. What decides is what is in the files, not where they lie.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.standalone.preprocess import Preprocessor

READ = ("*.json", "*.safetensors")
"""What the exporter reads of a checkpoint."""


@contextmanager
def traced_once() -> Iterator[None]:
    """As long as it lasts, the graph of a checkpoint whose like was traced is a copy of the one before."""
    from export.graph import onnx, quantized

    export, traced = onnx.export_float, dict[str, Path]()
    with tempfile.TemporaryDirectory(prefix="traced-") as scratch, pytest.MonkeyPatch.context() as patch:

        def export_once(checkpoint: Path, preprocessor: Preprocessor, out: Path, all_tokens: bool = False) -> Path:
            key = _key(checkpoint, f"{preprocessor} {all_tokens}")
            if key in traced:
                out.parent.mkdir(parents=True, exist_ok=True)
                return Path(shutil.copy(traced[key], out))
            made = export(checkpoint, preprocessor, out, all_tokens)
            if not made.with_name(f"{made.name}.data").exists():  # else the graph is not in one file
                traced[key] = Path(shutil.copy(made, Path(scratch, key)))
            return made

        patch.setattr(quantized, "export_float", export_once)
        yield


def _key(checkpoint: Path, settings: str) -> str:
    found = hashlib.sha256(settings.encode())
    for path in sorted(path for pattern in READ for path in checkpoint.glob(pattern)):
        found.update(f"{path.name} {path.stat().st_size} ".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
