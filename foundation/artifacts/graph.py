"""ONNX files: the contents of a graph, read once, and whole models that callers may change.

A model may hold gigabytes of weights in its own file (below 2 GB) or next to it. Whoever wants its nodes, shapes and types reads it without
them: `Graph.structure` is parsed once and shared by all objects of one file until the file changes. A whole model belongs to its caller
alone: nothing holds it after the caller's last reference.

Cleared fields of a protobuf message keep their memory, as upb frees all parts of a message at once. The structure is therefore parsed anew
from its own bytes, so that the weights are freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import onnx

from foundation.core.stamps import Stamps, stamps

SMALL = 1024
"""Bytes of a constant that stays in a structure: numbers, shapes and axes, but no weight."""
CONTENTS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


@dataclass(frozen=True)
class Graph:
    """An ONNX file."""

    path: Path

    @property
    def structure(self) -> onnx.GraphProto:
        """The graph without the contents of constants of more than `SMALL` bytes, whose names, types and shapes are there.

        It is shared: change a copy.

        Raises:
            OSError: The file cannot be read.
            google.protobuf.message.DecodeError: It is not an ONNX file.
        """
        return _structure(self.path, stamps([self.path])).graph

    def load(self, *, external: bool = True) -> onnx.ModelProto:
        """Returns the model, which is the caller's own.

        Args:
            external: Whether weights in files next to it are read too.

        Raises:
            OSError: A file cannot be read.
            google.protobuf.message.DecodeError: It is not an ONNX file.
        """
        return onnx.load(str(self.path), load_external_data=external)


@lru_cache(maxsize=4)
def _structure(path: Path, state: Stamps) -> onnx.ModelProto:
    del state  # part of the cache's key
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.ByteSize() > SMALL:
            for field in CONTENTS:
                tensor.ClearField(field)
    return onnx.ModelProto.FromString(model.SerializeToString())
