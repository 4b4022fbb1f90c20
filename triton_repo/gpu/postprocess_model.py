"""Triton Python model: turns the logits of the plan into answers. Runs inside the server, next to preprocess.py and its files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)  # Python wrote this file's bytecode before its first line ran
sys.path.insert(0, str(Path(__file__).parent))

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from preprocess import Preprocessor  # type: ignore[import-not-found]
from response import LOGITS, RESPONSES  # type: ignore[import-not-found]


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the label names."""
        self.preprocessor = Preprocessor.load(Path(__file__).parent)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns for each request the answers to its rows."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        logits = pb_utils.get_input_tensor_by_name(request, "logits").as_numpy()
        answers = RESPONSES[self.preprocessor.response].of(logits, self.preprocessor.labels)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in answers.items() if name != LOGITS])
