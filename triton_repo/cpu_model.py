"""Triton Python model: tokenizes or decodes, runs the engine, and returns the response that `response.py` makes of the logits. Runs inside
the server.

Its folder also holds settings.json, preprocess.py, long_text.py, windows.py, preprocess.json, tokenizer.json, response.py, for sounds
sound.py, for adapters adapted.py, and the engine: engine.py (`triton_repo.cpu_engines`) with its files and the modules that it imports.
Each request is preprocessed on its own, so a bad row fails only its own request. The rows of all requests from the dynamic batcher are then
grouped by shape (each row in its smallest bucket) and given to the engine. A question becomes one row for each window of its
context.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)  # Python wrote this file's bytecode before its first line ran
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from engine import Engine  # type: ignore[import-not-found]
from long_text import LongTexts  # type: ignore[import-not-found]
from preprocess import BadRow, Preprocessor  # type: ignore[import-not-found]
from response import RESPONSES, placed  # type: ignore[import-not-found]
from windows import joined, merged, read_contexts  # type: ignore[import-not-found]

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Piece:
    """Preprocessed rows of one request with the same shape."""

    request: int
    rows: list[int]
    features: dict[str, np.ndarray]


@dataclass(frozen=True)
class Predicted:
    """What the engine computed for the rows of one request."""

    rows: list[Any]
    """The rows, or questions with their windows."""
    logits: np.ndarray
    """float32 [n, C], or [n, L, C] of all tokens; of a question of all windows."""


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the preprocessor and prepares the engine for all shapes."""
        config = json.loads(args["model_config"])
        settings = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
        self.inputs = [value["name"] for value in config["input"]]
        self.preprocessor = Preprocessor.load(HERE)
        prepared = self.preprocessor
        self.long_texts = None if prepared.tokenizer is None else LongTexts(prepared.tokenizer, prepared.max_length, prepared.prompt)
        machine = HERE / "machine.json"  # settings of this machine, such as the cache folder of compiled networks
        properties = settings["properties"] | (json.loads(machine.read_text(encoding="utf-8")) if machine.exists() else {})
        self.engine = Engine(HERE, settings["mode"], settings["batch_sizes"], properties)
        shape = self.preprocessor.shape
        self.shapes = [(bucket,) for bucket in self.preprocessor.buckets] if shape is None else [shape]
        self.engine.prepare(self.shapes)
        self.most_rows = max(1, int(config["max_batch_size"]))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns one response for each request: its predictions or an error."""
        return [self.response(one) for one in self.predict([self.columns(request) for request in requests])]

    def columns(self, request: pb_utils.InferenceRequest) -> list[np.ndarray]:
        """Returns the inputs of a request, arrays of bytes [n, 1]; the names of adapters are left out where the request has none."""
        tensors = [pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs]
        return [tensor.as_numpy() for tensor in tensors if tensor is not None]

    def predict(self, requests: list[list[np.ndarray]]) -> list[Predicted | pb_utils.InferenceResponse]:
        """Returns what the engine computed for the rows of each request, whose columns are given; or the response with an error."""
        answers: list[pb_utils.InferenceResponse | None] = [None] * len(requests)
        pieces: dict[tuple[int, ...], list[Piece]] = {}
        logits: dict[int, Any] = {}
        given: dict[int, list[Any]] = {}
        for index, columns in enumerate(requests):
            try:
                rows, given[index] = self._read(self._rows(columns))
                own = [(next(iter(piece.features.values())).shape[1:], piece) for piece in self._pieces(index, rows)]
                for shape, piece in own:
                    pieces.setdefault(shape, []).append(piece)
                tokens = (self.preprocessor.positions(max(shape[0] for shape, _ in own)),) if self.preprocessor.per_token else ()
                shape = (len(rows), *tokens, self.preprocessor.width)
                logits[index] = [] if self.preprocessor.aggregate else np.zeros(shape, np.float32)
            except (BadRow, UnicodeDecodeError, ValueError, MemoryError) as error:
                answers[index] = refusal(error)
        for group in pieces.values():
            for some in self._parts([piece for piece in group if answers[piece.request] is None]):
                self._predict(some, logits, answers)
        return [self._predicted(given[index], logits[index]) if answer is None else answer for index, answer in enumerate(answers)]

    def _pieces(self, index: int, rows: list[Any]) -> list[Piece]:
        """Preprocesses all rows of one request; raises if one is bad."""
        return [Piece(index, members, features) for members, features in self.preprocessor.batches(rows, self.most_rows)]

    def _parts(self, group: list[Piece]) -> list[list[Piece]]:
        """Returns rows of the same shape as batches of at most `max_batch_size` rows, which windows may exceed."""
        parts: list[list[Piece]] = [[]]
        for piece in group:
            if parts[-1] and sum(len(one.rows) for one in parts[-1]) + len(piece.rows) > self.most_rows:
                parts.append([])
            parts[-1].append(piece)
        return parts

    def _read(self, rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the rows for the engine, and the inputs of the response: the same rows, or questions with their windows."""
        if not self.preprocessor.finds_spans:
            return rows, rows
        found = read_contexts(self.preprocessor, rows)
        return [window for one in found for window in one.rows], found

    def _rows(self, columns: list[np.ndarray]) -> list[Any]:
        """Returns texts, pairs of texts, or encoded images or sounds."""
        if self.preprocessor.modality != "text":
            return [bytes(value) for value in columns[0].reshape(-1)]
        texts = [[_text(row, value) for row, value in enumerate(column.reshape(-1))] for column in columns]
        names = texts.pop() if self.preprocessor.adapters and len(columns) == len(self.inputs) else []
        rows = [self._shortened(row, text) for row, text in enumerate(texts[0] if len(texts) == 1 else zip(*texts, strict=True))]
        if not names:  # of a model with adapters the preprocessor refuses rows without one
            return rows
        from adapted import with_adapter  # type: ignore[import-not-found]

        return [with_adapter(row, name) for row, name in zip(rows, names, strict=True)]

    def _shortened(self, row: int, text: Any) -> Any:
        """Cuts off the rest of a text that the model cannot read, so that long texts do not delay other requests."""
        assert self.long_texts is not None, "a model of texts has a tokenizer"
        if self.preprocessor.finds_spans or self.preprocessor.aggregate:  # all of it is read
            longest = max(map(len, text if isinstance(text, tuple) else (text,)))
            if longest > self.long_texts.most:
                raise BadRow(f"row {row}: a text of {longest} characters; {self.long_texts.most} are allowed: send it in parts")
            return (text[0].lstrip(), text[1]) if self.preprocessor.finds_spans else text
        try:
            return self.long_texts.shortened(text)
        except ValueError as error:
            raise BadRow(f"row {row}: {error}") from error

    def _predict(self, group: list[Piece], logits: dict[int, Any], answers: list[pb_utils.InferenceResponse | None]) -> None:
        """Runs rows of the same shape; if that fails, their requests get the error."""
        if not group:
            return
        features = {name: np.concatenate([piece.features[name] for piece in group]) for name in group[0].features}
        try:
            values = self.engine.predict(features)
        except (RuntimeError, MemoryError) as error:
            for piece in group:
                answers[piece.request] = refusal(error, pb_utils.TritonError.INTERNAL)
            return
        start = 0
        for piece in group:
            found = values[start : start + len(piece.rows)]
            whole = logits[piece.request]
            if self.preprocessor.aggregate:
                whole.append((piece.rows, found))
            else:  # rows of a request with logits for every token may have several lengths
                (whole[:, : found.shape[1]] if found.ndim > 2 else whole)[piece.rows] = found
            start += len(piece.rows)

    def _predicted(self, rows: list[Any], logits: Any) -> Predicted:
        """Returns what was computed for a request; of windows what is merged of them, or joined."""
        if self.preprocessor.aggregate:
            logits = merged(logits, len(rows), self.preprocessor.aggregate)
        return Predicted(rows, joined(rows, logits) if self.preprocessor.finds_spans else logits)

    def scored(self, predicted: Predicted) -> np.ndarray:
        """Returns the part of the logits of a request that says how sure its answers are, float32 [n, ...] (`response.Response.scored`)."""
        found: np.ndarray = RESPONSES[self.preprocessor.response].scored(predicted.logits, self._places(predicted))
        return found

    def _places(self, predicted: Predicted) -> list[Any]:
        """Returns where the answers stand in the rows of a request, as the form of the response has it."""
        return predicted.rows if self.preprocessor.finds_spans else placed(self.preprocessor, predicted.rows)

    def response(self, predicted: Predicted | pb_utils.InferenceResponse, **more: np.ndarray) -> pb_utils.InferenceResponse:
        """Returns the response to a request: what follows from its logits, and further outputs; an error stays as it is."""
        if not isinstance(predicted, Predicted):
            return predicted
        try:
            tensors = RESPONSES[self.preprocessor.response].of(predicted.logits, self.preprocessor.labels, self._places(predicted))
        except ValueError as error:
            return refusal(error, pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in (tensors | more).items()])


def _text(row: int, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"row {row}: not UTF-8 text (byte {error.start})") from error


def refusal(error: Exception, code: int | None = None) -> pb_utils.InferenceResponse:
    """Returns an error response with a one-line message."""
    line = " ".join(str(error).split())[:500] or type(error).__name__
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(line, pb_utils.TritonError.INVALID_ARG if code is None else code))
