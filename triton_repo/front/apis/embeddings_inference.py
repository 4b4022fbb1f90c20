"""The API of Text Embeddings Inference: vectors of texts, rankings of texts, and labels of texts.

    POST /embed      {"inputs": TEXT | [TEXT, ...], "normalize": true, "dimensions": D}          [[...], ...]
    POST /rerank     {"query": TEXT, "texts": [TEXT, ...], "raw_scores", "return_text"}          [{"index", "score", "text"}, ...]
    POST /predict    {"inputs": TEXT | [TEXT, TEXT] | [[TEXT], ...], "raw_scores"}   [{"label", "score"}, ...], or a list of such
    GET  /info       the model, and the limits of a request
    GET  /health     status 200 if the models are ready, as `/v2/health/ready`

These routes name no model, as that server has one. Where several models here fit, the key `model` names one. Texts that are longer than
the model reads are truncated, unless `truncate` is false: then they are refused. Source: https://huggingface.github.io/text-embeddings-inference
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

import numpy as np
from aiohttp import web
from pydantic import Field

from foundation.core.json_value import Json
from foundation.standalone.response import LOGITS, VECTOR
from triton_repo.config import TEXT, TEXT_PAIR
from triton_repo.front.apis.body import MOST_ROWS, Body, read
from triton_repo.front.apis.catalog import Catalog, Served
from triton_repo.front.apis.openai import shortened
from triton_repo.front.apis.scores import function_of, ranked, scores
from triton_repo.front.bodies import compact
from triton_repo.front.limits import MAX_CONNECTIONS, Rejected

PATHS = ("/embed", "/rerank", "/predict", "/info", "/health")
ERRORS = {**dict.fromkeys((400, 401, 404, 405, 413, 415), "validation"), 429: "overloaded", 503: "unhealthy"}
"""Type of an error by its status; any other is of the `backend`."""
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_ROWS)]
Row = Annotated[list[str], Field(min_length=1, max_length=2)]


class Common(Body):
    """Keys that all routes have."""

    model: str | None = None
    truncate: bool = True
    truncation_direction: Literal["right", "Right"] = "right"


class EmbedBody(Common):
    """Body of `/embed`."""

    inputs: str | Texts
    normalize: bool = True
    dimensions: Annotated[int, Field(ge=1)] | None = None


class RerankBody(Common):
    """Body of `/rerank`."""

    query: str
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False


class PredictBody(Common):
    """Body of `/predict`."""

    inputs: str | Row | Annotated[list[Row], Field(min_length=1, max_length=MOST_ROWS)]
    raw_scores: bool = False

    def rows(self) -> tuple[list[tuple[str, ...]], bool]:
        """Returns the rows, and whether they are a batch."""
        if isinstance(self.inputs, str):
            return [(self.inputs,)], False
        batch = [tuple(one) for one in self.inputs if isinstance(one, list)]
        return (batch, True) if batch else ([tuple(str(one) for one in self.inputs)], False)


class EmbeddingsInference:
    """The handlers.

    Args:
        catalog: The models.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def add(self, router: web.UrlDispatcher) -> None:
        """Adds the routes."""
        router.add_post("/embed", self.embed)
        router.add_post("/rerank", self.rerank)
        router.add_post("/predict", self.predict)
        router.add_get("/info", self.info)

    async def embed(self, request: web.Request) -> web.StreamResponse:
        """Vectors of texts."""
        body = EmbedBody.of(await read(request))
        model = await self._catalog.only(lambda one: one.embeds, "make vectors of texts", body.model)
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        _check_lengths(model, body, texts)
        vectors = (await self._catalog.predict(model, [(text,) for text in texts], VECTOR)).numbers(VECTOR)
        if body.dimensions is not None or body.normalize:
            vectors = shortened(vectors, vectors.shape[1] if body.dimensions is None else body.dimensions)
        return web.json_response(vectors.tolist(), dumps=compact)

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        """Texts by how well they answer a query, the best first."""
        body = RerankBody.of(await read(request))
        model = await self._catalog.only(lambda one: one.ranks, "rank texts", body.model)
        _check_lengths(model, body, [(body.query, text) for text in body.texts])
        logits = (await self._catalog.predict(model, [(body.query, text) for text in body.texts], LOGITS)).numbers(LOGITS)
        values = scores(logits, "none" if body.raw_scores else "sigmoid")[:, 0]
        order = np.argsort(-values, kind="stable")
        ranks: list[Json] = []
        for index in order:
            text: dict[str, Json] = {"text": body.texts[index]} if body.return_text else {}
            ranks.append({"index": int(index), **text, "score": float(values[index])})
        return web.json_response(ranks, dumps=compact)

    async def predict(self, request: web.Request) -> web.StreamResponse:
        """Labels of texts, or of pairs of texts."""
        body = PredictBody.of(await read(request))
        model = await self._catalog.only(_labels_texts, "label texts", body.model)
        rows, batch = body.rows()
        for row in rows:
            if len(row) != len(model.inputs):
                raise Rejected(f"inputs: {len(row)} texts in a row; model {model.name} takes {' and '.join(model.inputs)}")
        _check_lengths(model, body, rows)
        logits = (await self._catalog.predict(model, rows, LOGITS)).numbers(LOGITS)
        labels = ranked(logits, model, "none" if body.raw_scores else "sigmoid" if logits.shape[1] == 1 else function_of(model))
        return web.json_response(labels if batch else labels[0], dumps=compact)

    async def info(self, request: web.Request) -> web.StreamResponse:
        """What is served."""
        model = await self._catalog.only(
            lambda one: one.embeds or _labels_texts(one), "make vectors or labels of texts", request.query.get("model")
        )
        labels = model.known.labels
        names: dict[str, Json] = {"id2label": {str(index): name for index, name in enumerate(labels)}}
        names["label2id"] = {name: index for index, name in enumerate(labels)}
        kind: dict[str, Json] = {"embedding": {}} if model.embeds else {"reranker": names} if model.ranks else {"classifier": names}
        return web.json_response(
            {
                "model_id": model.name,
                "model_type": kind,
                "max_concurrent_requests": MAX_CONNECTIONS,
                "max_input_length": model.known.max_length,
                "max_client_batch_size": MOST_ROWS,
                "auto_truncate": True,
                "version": version("compress-transformers"),
            },
            dumps=compact,
        )


def error_document(status: int, message: str) -> tuple[int, dict[str, Json]]:
    """Returns status and error in the schema of that server: it says 429 where it is overloaded."""
    status = 429 if status == 503 and message.endswith("later") else status
    return status, {"error": message, "error_type": ERRORS.get(status, "backend")}


def _labels_texts(model: Served) -> bool:
    return model.classifies and set(model.inputs) <= {TEXT, TEXT_PAIR}


def _check_lengths(model: Served, body: Common, rows: list[str] | list[tuple[str, str]] | list[tuple[str, ...]]) -> None:
    """Refuses texts that would be truncated, if they must not be.

    Raises:
        Rejected: One of them is longer than the model reads.
    """
    if not body.truncate and (longer := model.overflow(rows)) is not None:
        raise Rejected(
            f"inputs: text {longer} is longer than the {model.known.max_length} tokens that the model reads; leave truncate out", 413
        )
