"""ONNX Runtime in the server: the ONNX file that was evaluated, under the name `model.onnx`, with its weights next to it.

The session takes every shape, so that all rows of a bucket run at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when it is imported

import numpy as np
import onnxruntime


class Engine:
    """A session.

    Args:
        folder: Holds the files.
        mode: dynamic.
        batch_sizes: Not used: no shape is compiled.
        properties: Attributes of the session options, whole numbers; names with dots are entries of its configuration.
    """

    def __init__(self, folder: Path, mode: str, batch_sizes: Sequence[int], properties: Mapping[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        for name, value in properties.items():
            if "." in name:
                options.add_session_config_entry(name, value)
            else:
                setattr(options, name, int(value))
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Does nothing: a session takes every shape."""

    def predict(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, float32 [n, C], of rows of the same shape."""
        (logits,) = self._session.run(["logits"], dict(features))
        return np.asarray(logits, dtype=np.float32)
