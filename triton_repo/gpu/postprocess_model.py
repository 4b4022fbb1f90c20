"""Triton Python model: turns the logits of the plan into label and score. Runs inside the server, next to preprocess.py and its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from preprocess import Preprocessor  # type: ignore[import-not-found]


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the label names."""
        self.preprocessor = Preprocessor.load(Path(__file__).resolve().parent)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns for each request the label and the score of its rows."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        answers = self.preprocessor.answer(pb_utils.get_input_tensor_by_name(request, "logits").as_numpy())
        labels = np.array([[label.encode("utf-8")] for label, _ in answers], dtype=object)
        scores = np.array([[score] for _, score in answers], dtype=np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LABEL", labels), pb_utils.Tensor("SCORE", scores)])
