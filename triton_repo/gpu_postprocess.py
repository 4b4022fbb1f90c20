"""Triton python model: from the logits of the plan to label and score.

Runs inside the server; `preprocess.py` and its files lie beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from preprocess import Preprocessor  # type: ignore[import-not-found]


class TritonPythonModel:
    """What the python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the names of the labels."""
        self.preprocessor = Preprocessor.load(Path(__file__).resolve().parent)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request with the label and the score of its rows."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        answers = self.preprocessor.answer(pb_utils.get_input_tensor_by_name(request, "logits").as_numpy())
        labels = np.array([[label.encode("utf-8")] for label, _ in answers], dtype=object)
        scores = np.array([[score] for _, score in answers], dtype=np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LABEL", labels), pb_utils.Tensor("SCORE", scores)])
