"""The API of OpenAI: models and embeddings; for completions see `completions`.

    GET  /v1/models                  the models that are served here
    POST /v1/embeddings              vectors of texts, as lists of numbers or base64 of little-endian float32

Source: https://platform.openai.com/docs/api-reference, as of 2026. Texts that are longer than the model reads are truncated, as
everywhere in this server; `usage` counts the tokens that were read.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Annotated, Literal

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from pydantic import Field

from foundation.core.json_value import Json
from foundation.standalone.response import VECTOR
from triton_repo.front.apis.body import MOST_ROWS, Body, read
from triton_repo.front.apis.catalog import Catalog, Served
from triton_repo.front.bodies import compact
from triton_repo.front.limits import Rejected

STARTED = int(time.time())
"""When the server started, which stands for the moment at which a model was made."""
ERRORS = dict.fromkeys((400, 401, 404, 405, 413, 415), "invalid_request_error")
"""Type of an error by its status; any other is a `server_error`."""
CODES = {401: "invalid_api_key", 404: "model_not_found"}


class Metadata(Body):
    """Keys that say something to a provider about the request, and change no answer."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EmbeddingsBody(Metadata):
    """Body of `/v1/embeddings`."""

    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=MOST_ROWS)] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts.

        Raises:
            Rejected: Tokens are given.
        """
        rows: list[object] = [self.input] if isinstance(self.input, str) else list(self.input)
        texts = [row for row in rows if isinstance(row, str)]
        if len(texts) != len(rows) or not texts:
            raise Rejected(
                "input: tokens are given; texts are expected, as the tokens of another model's tokenizer mean nothing here (LangChain "
                "sends texts with check_embedding_ctx_length=False)"
            )
        return texts


class OpenAI:
    """The handlers.

    Args:
        catalog: The models.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def add(self, router: web.UrlDispatcher) -> None:
        """Adds the routes."""
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{model}", self.model)
        router.add_post("/v1/embeddings", self.embeddings)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The models."""
        return _json({"object": "list", "data": [_model(one) for one in await self._catalog.all()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """One model."""
        return _json(_model(await self._catalog.named(request.match_info["model"])))

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """Vectors of texts."""
        body = EmbeddingsBody.of(await read(request))
        texts = body.texts
        model = await self._catalog.only(lambda one: one.embeds, "make vectors of texts", body.model)
        predicting = asyncio.ensure_future(self._catalog.predict(model, [(text,) for text in texts], VECTOR))
        try:
            await asyncio.sleep(0)  # the texts are on their way to the model while their tokens are counted
            tokens = model.tokens(texts) if len(texts) == 1 else await asyncio.to_thread(model.tokens, texts)
            vectors = (await predicting).numbers(VECTOR)
        finally:
            predicting.cancel()
        if body.dimensions is not None:
            vectors = shortened(vectors, body.dimensions)
        data: list[Json] = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage: dict[str, Json] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json({"object": "list", "data": data, "model": model.name, "usage": usage})


def shortened(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Returns the first `dimensions` numbers of each vector, float32 [n, D], at length 1, as Matryoshka vectors are used.

    Raises:
        Rejected: The vectors have fewer.
    """
    if dimensions > vectors.shape[1]:
        raise Rejected(f"dimensions: {dimensions} given; the vectors of this model have {vectors.shape[1]}")
    first = vectors[:, :dimensions]
    return np.asarray(first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), np.finfo(np.float32).tiny), np.float32)


def error_document(status: int, message: str) -> dict[str, Json]:
    """Returns an error in the schema of OpenAI."""
    return {
        "error": {"message": message, "type": ERRORS.get(status, "server_error"), "param": None, "code": CODES.get(status)},
    }


def _model(model: Served) -> dict[str, Json]:
    return {"id": model.name, "object": "model", "created": STARTED, "owned_by": "compress"}


def _written(vector: NDArray[np.float32], encoding: str) -> Json:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(value) for value in vector]


def _json(document: dict[str, Json]) -> web.Response:
    return web.json_response(document, dumps=compact)
