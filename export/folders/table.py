"""The table of formats that a variant is published in: a row for each. Other code tests a fact, never a name.

To add a format, add a row, and a file with `write(source, out)`: it fills an existing empty folder and returns what the folder holds.

Importing this file loads neither torch nor an engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.folders.source import Source, Written

Writer = Callable[["Source", Path], "Written"]


@dataclass(frozen=True)
class Format:
    """The facts about one format."""

    title: str
    """The format in prose."""
    library: str
    """`library_name` of model cards."""
    write: Writer
    """Fills an existing empty folder."""
    tags: tuple[str, ...] = ()
    """Tags of model cards."""


def _writer(module: str) -> Writer:
    """Returns a function that imports the file of a format on first use."""

    def write(source: Source, out: Path) -> Written:
        found: Written = importlib.import_module(module).write(source, out)
        return found

    return write


FORMATS: Mapping[str, Format] = {
    "transformers": Format("Transformers", "transformers", _writer("export.folders.transformers_folder")),
    "compressed-tensors": Format(
        "compressed-tensors", "transformers", _writer("export.folders.packed_folder"), tags=("compressed-tensors",)
    ),
    "onnx": Format("ONNX", "onnx", _writer("export.folders.onnx_folder"), tags=("onnx",)),
    "openvino": Format("OpenVINO", "openvino", _writer("export.folders.openvino_folder"), tags=("openvino",)),
    "gguf": Format("GGUF", "gguf", _writer("export.folders.gguf_folder"), tags=("gguf",)),
    # rows are added above this line
}
