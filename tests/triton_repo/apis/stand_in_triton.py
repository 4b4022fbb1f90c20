"""A channel to a Triton whose models answer by rule, so that an answer of a route can be computed beside it.

vectors       the numbers of letters a to h of a text
polarity      logits (number of letters, number of e) of `LABELS`
topics        the same for three labels of which any number may hold
value         the number of letters
reranker      the number of letters that query and text share
shops         logits (number of letters, 0 for the adapter a and 2 for b)
entities      each word that begins with a capital letter, as a name
questions     the first word of the context
story         an answer of the words of the prompt, one word a piece, SEED is replaced by the seed; the log-probability of word i is -i/8
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from tritonclient.grpc import service_pb2 as pb

from foundation.standalone.preprocess import Preprocessor
from triton_repo.generation.config import PROMPTS
from triton_repo.generation.served.request import FIELDS

KINDS = {"TYPE_STRING": "BYTES", "TYPE_BOOL": "BOOL", "TYPE_INT32": "INT32", "TYPE_INT64": "INT64", "TYPE_FP32": "FP32"}
"""Datatypes of the protocol by those of config.pbtxt."""
LETTERS = "abcdefgh"
TOKENS = 8
"""The most tokens that a model reads."""
MOST_ROWS = 3
TEXT_MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "vectors": (("TEXT",), ("VECTOR",), {"task": "sentence-embedding", "response": "vector", "dimensions": 8, "labels": ("vector",)}),
    "polarity": (("TEXT",), ("LABEL", "SCORE", "LOGITS"), {"task": "text-classification", "labels": ("good", "bad")}),
    "topics": (("TEXT",), ("LABEL", "SCORE", "LOGITS"), {"task": "text-classification", "response": "labels", "labels": ("x", "y")}),
    "value": (("TEXT",), ("LABEL", "SCORE", "LOGITS"), {"task": "text-regression", "labels": ("value",)}),
    "reranker": (("TEXT", "TEXT_PAIR"), ("LABEL", "SCORE", "LOGITS"), {"task": "text-ranking", "labels": ("value",)}),
    "entities": (("TEXT",), ("ENTITIES", "LOGITS"), {"task": "token-classification", "response": "entities", "labels": ("O", "B-NAME")}),
    "shops": (
        ("TEXT", "ADAPTER"),
        ("LABEL", "SCORE", "LOGITS"),
        {"task": "text-classification", "labels": ("x", "y"), "adapters": ("a", "b")},
    ),
    "questions": (("QUESTION", "CONTEXT"), ("ANSWER", "LOGITS"), {"task": "question-answering", "response": "span", "labels": ("s", "e")}),
}


def shared(query: str, text: str) -> int:
    return len(set(query) & set(text))


def vector(text: str) -> list[float]:
    return [float(text.count(letter)) for letter in LETTERS]


def logits(text: str) -> list[float]:
    return [float(len(text)), float(text.count("e"))]


def entity(text: str) -> list[dict[str, Any]]:
    found, place = [], 0
    for word in text.split(" "):
        if word[:1].isupper():
            found.append({"entity": "NAME", "start": place, "end": place + len(word), "score": 0.5, "text": word})
        place += len(word) + 1
    return found


def span(question: str, context: str) -> dict[str, Any]:
    word = context.split(" ")[0]
    return {"text": word, "start": 0, "end": len(word), "score": 1.0, "null_score": 0.0, "probability": 0.75}


RULES: dict[str, Callable[..., Any]] = {
    "vectors": lambda text: {"VECTOR": vector(text)},
    "polarity": lambda text: {"LOGITS": logits(text)},
    "topics": lambda text: {"LOGITS": logits(text)},
    "value": lambda text: {"LOGITS": [float(len(text))]},
    "reranker": lambda query, text: {"LOGITS": [float(shared(query, text))]},
    "entities": lambda text: {"ENTITIES": json.dumps(entity(text))},
    "shops": lambda text, adapter: {"LOGITS": [float(len(text)), 2.0 * "ab".index(adapter)]},
    "questions": lambda question, context: {"ANSWER": json.dumps(span(question, context))},
}


def write_models(folder: Path) -> dict[str, Any]:
    """Writes the preprocessor of each model below `folder`; returns the routes."""
    words = {"[UNK]": 0, "a": 1, "bad": 2, "cab": 3}
    for name, (_, _, values) in TEXT_MODELS.items():
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        (folder / name / "1").mkdir(parents=True)
        Preprocessor("text", ("input_ids", "attention_mask"), max_length=TOKENS, buckets=(TOKENS,), tokenizer=tokenizer, **values).save(
            folder / name / "1"
        )
    routes: dict[str, Any] = {name: {"version": "1", "max_rows": MOST_ROWS} for name in TEXT_MODELS}
    return {**routes, "story": {"version": "1", "request_seconds": 60.0}}


class Triton:
    """The channel.

    Args:
        refuses: Message with which every request is refused; empty: none is.
        seconds: Time for a piece of an answer.
    """

    def __init__(self, refuses: str = "", seconds: float = 0.0) -> None:
        self.refuses, self.seconds = refuses, seconds
        self.requests: list[Any] = []
        self.ended = 0
        """Streams that were cancelled or read to the end."""

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        return {"ModelMetadata": self._metadata, "ServerReady": self._ready, "ModelInfer": self._infer}.get(method.rsplit("/", 1)[1])

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return self._stream

    async def _ready(self, request: Any, timeout: float) -> Any:
        return pb.ServerReadyResponse(ready=True)

    async def _metadata(self, request: Any, timeout: float) -> Any:
        described = pb.ModelMetadataResponse(name=request.name)
        if request.name == "story":
            for name, (kind, size, _) in PROMPTS.items():
                described.inputs.add(name=name, datatype=KINDS[kind], shape=[size])
            for field in FIELDS:
                described.inputs.add(name=field.name, datatype=KINDS[field.datatype], shape=[1])
            return described
        inputs, outputs, _ = TEXT_MODELS[request.name]
        for name in inputs:
            described.inputs.add(name=name, datatype="BYTES", shape=[-1, 1])
        for name in outputs:
            described.outputs.add(name=name, datatype="FP32", shape=[-1, 1])
        return described

    async def _infer(self, request: Any, timeout: float) -> bytes:
        self.requests.append(request)
        if self.refuses:
            raise grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), grpc.aio.Metadata(), details=self.refuses)
        rows = list(zip(*(list(read_texts(raw)) for raw in request.raw_input_contents), strict=True))
        assert len(rows) <= MOST_ROWS
        answers = [RULES[request.model_name](*row) for row in rows]
        response = pb.ModelInferResponse(model_name=request.model_name)
        for output in request.outputs:
            values = [answer[output.name] for answer in answers]
            if isinstance(values[0], str):
                response.outputs.add(name=output.name, datatype="BYTES", shape=[len(rows), 1])
                response.raw_output_contents.append(b"".join(struct.pack("<I", len(one.encode())) + one.encode() for one in values))
            else:
                array = np.array(values, np.float32)
                response.outputs.add(name=output.name, datatype="FP32", shape=array.shape)
                response.raw_output_contents.append(array.tobytes())
        return response.SerializeToString()  # type: ignore[no-any-return]

    def _stream(self, requests: Any, timeout: float, metadata: Any = None) -> Any:
        return Stream(self, next(requests))


class Stream:
    """The answer of the model `story`: the words of the prompt, as many as are asked for, each a token."""

    def __init__(self, triton: Triton, request: Any) -> None:
        self._triton, self._left = triton, self._responses(request)
        triton.requests.append(request)

    def _responses(self, request: Any) -> Iterator[Any]:
        if self._triton.refuses:
            yield pb.ModelStreamInferResponse(error_message=self._triton.refuses)
            return
        given = inputs_of(request)
        text = given.get("TEXT") or (
            json.loads(given["MESSAGES"])[-1]["content"] if "MESSAGES" in given else " ".join(map(str, given["INPUT_IDS"]))
        )
        words = text.replace("SEED", str(given.get("SEED"))).split(" ")
        most = given.get("MAX_TOKENS", len(words))
        pieces = [word if index == 0 else f" {word}" for index, word in enumerate(words[:most])]
        entries = listed(pieces, given["LOGPROBS"]) if "LOGPROBS" in given else None
        if not given["STREAM"]:
            pieces = ["".join(pieces)]
        for index, piece in enumerate(pieces):
            response = pb.ModelInferResponse(model_name="story")
            add(response, "TEXT", piece)
            if entries is not None:
                add(response, "LOGPROBS", json.dumps(entries if len(pieces) == 1 else entries[index : index + 1]))
            if index == len(pieces) - 1:
                add(response, "FINISH_REASON", "length" if most < len(words) else "stop")
                add(response, "PROMPT_TOKENS", len(words))
                add(response, "COMPLETION_TOKENS", min(most, len(words)))
            yield pb.ModelStreamInferResponse(infer_response=response)

    async def read(self) -> Any:
        await asyncio.sleep(self._triton.seconds)
        return next(self._left, grpc.aio.EOF)

    def cancel(self) -> None:
        self._triton.ended += 1


def listed(pieces: list[str], most: int) -> list[dict[str, Any]]:
    """The log-probabilities of words; the likeliest in each place are parts of one letter, the end token, and the word itself."""
    found, offset = [], 0
    for index, piece in enumerate(pieces):
        best = [{"token": "\\xe2", "bytes": [0xE2]}, {"token": "<end>", "bytes": None}, {"token": piece, "bytes": list(piece.encode())}]
        own = {**best[2], "id": 5, "logprob": -index / 8, "text_offset": offset}
        found.append({**own, "top_logprobs": [{**one, "id": 7, "logprob": -index / 8} for one in best[:most]]})
        offset += len(piece)
    return found


def add(response: Any, name: str, value: str | int) -> None:
    """Adds an output of one element."""
    if isinstance(value, str):
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(struct.pack("<I", len(value.encode())) + value.encode())
    else:
        response.outputs.add(name=name, datatype="INT32", shape=[1])
        response.raw_output_contents.append(struct.pack("<i", value))


def inputs_of(request: Any) -> dict[str, Any]:
    """Returns the inputs of a request to `story` by name."""
    found: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        kinds = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
        values = list(read_texts(raw)) if tensor.datatype == "BYTES" else np.frombuffer(raw, kinds[tensor.datatype]).tolist()
        found[tensor.name] = values if list(tensor.shape) != [1] or tensor.name in ("STOP", "INPUT_IDS") else values[0]
    return found


def read_texts(raw: bytes) -> Iterator[str]:
    """Yields the texts of a tensor."""
    place = 0
    while place < len(raw):
        size = struct.unpack_from("<I", raw, place)[0]
        yield raw[place + 4 : place + 4 + size].decode()
        place += 4 + size
