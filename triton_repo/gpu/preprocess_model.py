"""Triton Python model: turns rows into the input arrays of the plan. Runs inside the server, next to preprocess.py and its files.

long_text.py is there, too. Each request is preprocessed on its own and padded to the smallest bucket that holds its longest row, so that
the dynamic batcher of the plan finds requests of equal shape. A bad row fails only its own request.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)  # Python wrote this file's bytecode before its first line ran
sys.path.insert(0, str(Path(__file__).parent))

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from long_text import LongTexts  # type: ignore[import-not-found]
from preprocess import BadRow, Preprocessor  # type: ignore[import-not-found]


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the preprocessor and reads the input names from the model configuration."""
        config = json.loads(args["model_config"])
        self.inputs = [value["name"] for value in config["input"]]
        self.preprocessor = prepared = Preprocessor.load(Path(__file__).parent)
        self.long_texts = None if prepared.tokenizer is None else LongTexts(prepared.tokenizer, prepared.max_length, prepared.prompt)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns for each request the input arrays of its rows, or an error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            features = self.preprocessor.encode(self._rows(request))
        except (BadRow, UnicodeDecodeError) as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in features.items()])

    def _rows(self, request: pb_utils.InferenceRequest) -> list[str | tuple[str, ...] | bytes]:
        """Returns text, pairs of text, or encoded images; each input is an array of bytes [n, 1]."""
        columns = [pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1) for name in self.inputs]
        if self.preprocessor.modality == "image":
            return [bytes(value) for value in columns[0]]
        texts = [[value.decode("utf-8") for value in column] for column in columns]
        return [self._shortened(row, text) for row, text in enumerate(texts[0] if len(texts) == 1 else zip(*texts, strict=True))]

    def _shortened(self, row: int, text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """Returns a text or a pair without what cannot matter, so that it does not hold up others."""
        assert self.long_texts is not None, "a model of texts has a tokenizer"
        try:
            shortened: str | tuple[str, ...] = self.long_texts.shortened(text)
            return shortened
        except ValueError as error:
            raise BadRow(f"row {row}: {error}") from error
