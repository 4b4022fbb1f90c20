"""The routes of other servers on a served run: what real clients get beside the answers over gRPC, and what a route costs.

    compress run RECIPE --out RUN
    python benchmarks/server/clients.py RUN [--model NAME] [--rows 200] [--turns 5] [--seconds 5] [--only equal throughput] [--out FILE]

A run of `sentence-embedding`, `text-classification`, `text-ranking`, `token-classification` or `question-answering`. The packages `openai`
and `huggingface_hub` have to be installed. The clients run on the machine of the server and share its cores.

    equal        `--rows` evaluation rows, by each client and route that fits: the largest difference from the answers over gRPC
    throughput   vectors: rows per second of `/v1/embeddings` and of `/v2` HTTP with binary tensors, in turns; ratios are those within a
                 turn. Requests of 32 texts, or of as many as the server batches, 4 under way
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

import aiohttp
import numpy as np
import openai
from huggingface_hub import AsyncInferenceClient

from foundation.machine.environment import fingerprint
from foundation.standalone.response import ANSWER, ENTITIES, LOGITS, VECTOR
from parts.http_load import Request, loaded
from parts.served_model import ServedModel, arguments, carry_out, in_turns, median, ratio
from triton_repo import client

ROWS, UNDER_WAY = 32, 4
"""Most texts of a request at saturation, and requests under way."""
Compared = Callable[[str, str, Sequence[Any], client.Answers], Awaitable[dict[str, Any]]]
"""Asks one client for rows; returns the differences from the answers over gRPC."""


class Bench:
    """What the scenarios share.

    Args:
        model: The model.
        given: The command line.
    """

    def __init__(self, model: ServedModel, given: argparse.Namespace) -> None:
        self.model, self.rows = model, list(model.rows)[: given.rows]
        self.turns, self.seconds = given.turns, given.seconds


async def vectors_by_openai(address: str, model: str, rows: Sequence[Any], expected: client.Answers) -> dict[str, Any]:
    """`openai`: vectors as base64, and as lists."""
    asking, found = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none"), {}
    encoding: Any
    for encoding in ("base64", "float"):
        answer = await asking.embeddings.create(model=model, input=list(rows), encoding_format=encoding)
        vectors = [
            np.frombuffer(base64.b64decode(one.embedding), "<f4") if isinstance(one.embedding, str) else one.embedding
            for one in answer.data
        ]
        found[f"openai, /v1/embeddings, {encoding}"] = difference(vectors, expected.logits)
    return found


async def vectors_by_hugging_face(address: str, model: str, rows: Sequence[Any], expected: client.Answers) -> dict[str, Any]:
    """`huggingface_hub` and plain HTTP: vectors of the route of the task, and of Text Embeddings Inference."""
    vectors = await AsyncInferenceClient(model=f"{address}/models/{model}", token="none").feature_extraction(list(rows))
    embedded = await posted(f"{address}/embed", {"inputs": list(rows), "normalize": False})
    return {
        "huggingface_hub, feature_extraction": difference(vectors, expected.logits),
        "HTTP, /embed": difference(embedded, expected.logits),
    }


async def labels_by_hugging_face(address: str, model: str, rows: Sequence[Any], expected: client.Answers) -> dict[str, Any]:
    """`huggingface_hub` and plain HTTP: scores of all labels of single texts."""
    if not isinstance(rows[0], str):
        ranked = [await posted(f"{address}/rerank", {"query": one[0], "texts": [one[1]], "raw_scores": True}) for one in rows]
        return {"HTTP, /rerank": difference([[one[0]["score"]] for one in ranked], expected.logits)}
    asking = AsyncInferenceClient(model=f"{address}/models/{model}", token="none")
    labelled = [await asking.text_classification(row, function_to_apply="none") for row in rows]
    predicted = await posted(f"{address}/predict", {"inputs": [[row] for row in rows], "raw_scores": True})
    by_falling = -np.sort(-expected.logits, axis=1)
    return {
        "huggingface_hub, text_classification": difference([[label.score for label in one] for one in labelled], by_falling),
        "HTTP, /predict": difference([[label["score"] for label in one] for one in predicted], by_falling),
    }


async def texts_by_hugging_face(address: str, model: str, rows: Sequence[Any], expected: client.Answers) -> dict[str, Any]:
    """`huggingface_hub`: entities, and answers to questions; how many rows have others than over gRPC."""
    asking, apart = AsyncInferenceClient(model=f"{address}/models/{model}", token="none"), 0
    name = ENTITIES if ENTITIES in expected.outputs else ANSWER
    for row, output in zip(rows, expected.outputs[name], strict=True):
        own = json.loads(output[0])
        if name == ENTITIES:
            entities = await asking.token_classification(row)
            apart += [(one.word, one.start, one.end) for one in entities] != [(one["text"], one["start"], one["end"]) for one in own]
        else:
            answer: Any = await asking.question_answering(question=row.question, context=row.context)
            apart += (answer.answer, answer.start) != (own["text"], own["start"])
    return {f"huggingface_hub, {name.lower()}": {"n": len(rows), "rows_apart": int(apart)}}


CLIENTS: dict[str, tuple[Compared, ...]] = {
    VECTOR: (vectors_by_openai, vectors_by_hugging_face),
    ENTITIES: (texts_by_hugging_face,),
    ANSWER: (texts_by_hugging_face,),
    LOGITS: (labels_by_hugging_face,),
}
"""The clients of a model, by the first of these outputs that it has."""


def equal(bench: Bench) -> dict[str, Any]:
    """See above."""
    outputs = [one.name for one in bench.model.config.output]
    kind = next(name for name in CLIENTS if name in outputs)
    with bench.model.serving() as serving:
        expected = client.evaluate(serving.service.grpc_address, bench.model.name, bench.rows)

        async def all_of_them() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for one in CLIENTS[kind]:
                found |= await one(f"http://{serving.service.http_address}", bench.model.name, bench.rows, expected)
            return found

        return asyncio.run(all_of_them())


def throughput(bench: Bench) -> dict[str, Any]:
    """See above."""
    size = min(ROWS, bench.model.config.max_batch_size)  # /v2 takes no more rows in a request
    some = [bench.rows[start : start + size] for start in range(0, len(bench.rows) - size + 1, size)]
    with bench.model.serving() as serving:
        address = f"http://{serving.service.http_address}"
        v1: list[Request] = [(asked_for(bench.model.name, group), {}) for group in some]
        v2: list[Request] = [binary(group) for group in some]
        arms = {
            "/v1/embeddings": lambda: loaded(f"{address}/v1/embeddings", v1, size, bench.seconds, UNDER_WAY),
            "/v2 HTTP": lambda: loaded(f"{address}/v2/models/{bench.model.name}/infer", v2, size, bench.seconds, UNDER_WAY),
        }
        for arm in arms.values():
            arm()  # warms up
        found = in_turns(arms, bench.turns)
    return {
        "rows_per_s": {name: median(one, "rows_per_s") for name, one in found.items()},
        "/v1/embeddings over /v2 HTTP": ratio(found["/v1/embeddings"], found["/v2 HTTP"]),
        "turns": found,
    }


def asked_for(model: str, texts: Sequence[str]) -> bytes:
    """Returns a request over `/v1/embeddings`."""
    return json.dumps({"model": model, "input": texts, "encoding_format": "base64"}).encode()


def binary(texts: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """Returns a request over `/v2` with texts and answer as raw bytes, and its headers."""
    encoded = [text.encode() for text in texts]
    raw = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    tensor = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


async def posted(url: str, document: Any) -> Any:
    """Returns the JSON that comes back for a JSON."""
    async with aiohttp.ClientSession() as session, session.post(url, json=document) as response:
        response.raise_for_status()
        return await response.json()


def difference(found: Any, expected: Any) -> dict[str, Any]:
    """Returns the largest difference between two arrays of the same shape."""
    one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert one.shape == other.shape, f"{one.shape} came, {other.shape} expected"
    return {"n": len(other), "max_difference": float(np.abs(one - other).max())}


def main() -> None:
    """Runs the scenarios."""
    parser = arguments(__doc__, [equal, throughput], seconds=5.0)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    model = ServedModel.of(given.run, given.model)
    packages = {name: version(name) for name in ("openai", "huggingface_hub", "aiohttp")}
    carry_out(given, {"model": model.name, "machine": fingerprint(), "packages": packages}, [equal, throughput], Bench(model, given))


if __name__ == "__main__":
    main()
