"""The API of Hugging Face Inference: each task in the form that `huggingface_hub.InferenceClient` reads.

The client is given the address of a model: `InferenceClient(model="http://HOST:PORT/models/NAME")`.

    POST /models/NAME    {"inputs": ..., "parameters": {...}}, or the bytes of an image or a sound

    labels of a text            {"inputs": TEXT | [TEXT, ...]}                               [[{"label", "score"}, ...], ...]
    labels of a pair            {"inputs": {"text": TEXT, "text_pair": TEXT}}                the same
    by one of several adapters  {"inputs": ..., "parameters": {"adapter": NAME}}             the same
    entities                    {"inputs": TEXT}                                             [{"entity_group", "word", "start", ...}]
    answers to questions        {"inputs": {"question": TEXT, "context": TEXT}}              {"answer", "score", "start", ...}
    vectors                     {"inputs": TEXT | [TEXT, ...]}                               [[...], ...]
    similarity                  {"inputs": {"source_sentence": TEXT, "sentences": [...]}}    [cosine, ...]
    labels of images, sounds    bytes, or {"inputs": BASE64}                                 [{"label", "score"}, ...]
    transcripts                 bytes, or {"inputs": BASE64}                                 {"text"}
    generated text              {"inputs": TEXT, "parameters": {"max_new_tokens", ...}}      [{"generated_text"}]

Source: https://huggingface.co/docs/inference-providers/tasks, as of 2026. `/models/NAME/pipeline/TASK` is the same route, and
`/models/NAME/v1/chat/completions` a conversation.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import numpy as np
from aiohttp import web
from pydantic import Field

from foundation.core.json_value import Json
from foundation.standalone.adapted import listed
from foundation.standalone.response import ANSWER, ENTITIES, LOGITS, TRANSCRIPT, VECTOR
from triton_repo.config import ADAPTER, AUDIO, CONTEXT, IMAGE, QUESTION, TEXT, TEXT_PAIR
from triton_repo.front.apis.body import MOST_ROWS, Body, JsonObject, read
from triton_repo.front.apis.catalog import Catalog, Part, Served, parts
from triton_repo.front.apis.openai import shortened
from triton_repo.front.apis.scores import Function, function_of, ranked
from triton_repo.front.bodies import compact
from triton_repo.front.generation import generation_request, write_generation
from triton_repo.front.generations import Generations
from triton_repo.front.limits import Rejected

Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_ROWS)]
MOST_LABELS = 5
"""Labels of an image or a sound, where nothing else is asked for."""
GENERATED = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
"""Parameters of a language model: its inputs in small letters, but for the first."""


class PairInput(JsonObject):
    """A pair of texts."""

    text: str
    text_pair: str


class QuestionInput(JsonObject):
    """A question about a text."""

    question: str
    context: str


class SimilarityInput(JsonObject):
    """A text, and others to compare with it."""

    source_sentence: str
    sentences: Texts


class Parameters(JsonObject):
    """Parameters of all tasks; None where one is not given."""

    function_to_apply: Function | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    do_sample: bool | None = None
    return_full_text: Literal[False] | None = None
    adapter: str | None = None
    details: Literal[False] | None = None
    decoder_input_details: Literal[False] | None = None
    watermark: Literal[False] | None = None


class TaskBody(Body):
    """Body of a request."""

    inputs: str | Texts | PairInput | QuestionInput | SimilarityInput
    parameters: Parameters = Parameters()
    normalize: bool | None = None
    stream: Literal[False] = False


class HuggingFace:
    """The handlers.

    Args:
        catalog: The models.
        generations: Answers language models.
    """

    def __init__(self, catalog: Catalog, generations: Generations) -> None:
        self._catalog, self._generations = catalog, generations

    def add(self, router: web.UrlDispatcher) -> None:
        """Adds the routes."""
        for path in ("/models/{model}", "/models/{model}/pipeline/{task}"):
            router.add_post(path, self.answer)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The answer of a model to its kind of input."""
        model = await self._catalog.named(request.match_info["model"])
        content = await read(request)
        if model.inputs in ((IMAGE,), (AUDIO,)):
            answered = await self._of_file(model, content, is_json=request.content_type == "application/json")
        else:
            body = TaskBody.of(content)
            _check_parameters(model, body.parameters)
            answered = await (self._generated if model.generates else self._of_texts)(model, body)
        return web.json_response(answered, dumps=compact)

    async def _of_file(self, model: Served, content: bytes, *, is_json: bool) -> Json:
        """Returns the answer to an image or a sound."""
        parameters = Parameters()
        if is_json:
            body = TaskBody.of(content)
            content, parameters = _decoded(body.inputs), body.parameters
            _check_parameters(model, parameters)
        if TRANSCRIPT in model.outputs:
            return {"text": (await self._catalog.predict(model, [(content,)], TRANSCRIPT)).texts(TRANSCRIPT)[0]}
        if VECTOR in model.outputs:
            vectors: Json = (await self._catalog.predict(model, [(content,)], VECTOR)).numbers(VECTOR).tolist()
            return vectors
        logits = (await self._catalog.predict(model, [(content,)], LOGITS)).numbers(LOGITS)
        return ranked(logits, model, parameters.function_to_apply or function_of(model), parameters.top_k or MOST_LABELS)[0]

    async def _of_texts(self, model: Served, body: TaskBody) -> Json:
        """Returns the answer to texts."""
        if isinstance(body.inputs, SimilarityInput):
            return await self._similarity(model, body.inputs)
        rows, single = _rows(model, body.inputs, body.parameters.adapter)
        if model.embeds:
            vectors = (await self._catalog.predict(model, rows, VECTOR)).numbers(VECTOR)
            written: Json = (shortened(vectors, vectors.shape[1]) if body.normalize else vectors).tolist()
            return written
        if ENTITIES in model.outputs:
            entities: list[Json] = [_entities(text) for text in (await self._catalog.predict(model, rows, ENTITIES)).texts(ENTITIES)]
            return entities[0] if single else entities
        if ANSWER in model.outputs:
            answers = [_span(text) for text in (await self._catalog.predict(model, rows, ANSWER)).texts(ANSWER)]
            return answers[0]
        logits = (await self._catalog.predict(model, rows, LOGITS)).numbers(LOGITS)
        parameters = body.parameters
        return [*ranked(logits, model, parameters.function_to_apply or function_of(model), parameters.top_k)]

    async def _similarity(self, model: Served, texts: SimilarityInput) -> Json:
        """Returns the cosines of texts with a text."""
        if not model.embeds:
            raise Rejected(f"model {model.name}: it does not make vectors of texts")
        rows = [(text,) for text in (texts.source_sentence, *texts.sentences)]
        vectors = (await self._catalog.predict(model, rows, VECTOR)).numbers(VECTOR)
        unit = shortened(vectors, vectors.shape[1]).astype(np.float64)
        cosines: Json = (unit[1:] @ unit[0]).tolist()
        return cosines

    async def _generated(self, model: Served, body: TaskBody) -> Json:
        """Returns the answer of a language model."""
        if not isinstance(body.inputs, str):
            raise Rejected(f"inputs: one text is expected by model {model.name}")
        parameters = body.parameters.model_dump(exclude_none=True, include=set(GENERATED))
        values: dict[str, Json] = {"MAX_TOKENS" if key == "max_new_tokens" else key.upper(): one for key, one in parameters.items()}
        request = generation_request(model.description, "", {TEXT: body.inputs, **values}, stream=False)
        async with aclosing(self._generations.responses(request)) as responses:
            texts = [str(write_generation(response, model.description)["TEXT"]) async for response in responses]
        return [{"generated_text": "".join(texts)}]


def _rows(
    model: Served, inputs: str | list[str] | PairInput | QuestionInput, adapter: str | None = None
) -> tuple[list[tuple[Part, ...]], bool]:
    """Returns the rows, and whether it is a single one that was not in a list.

    Args:
        model: The model.
        inputs: The inputs of the request.
        adapter: The adapter that is to answer them; None where the request names none.

    Raises:
        Rejected: The model takes other rows, or has no such adapter.
    """
    named = _adapter(model, adapter)
    if isinstance(inputs, PairInput):
        return [parts(model, {TEXT: inputs.text, TEXT_PAIR: inputs.text_pair, **named})], True
    if isinstance(inputs, QuestionInput):
        return [parts(model, {QUESTION: inputs.question, CONTEXT: inputs.context})], True
    texts: Sequence[str] = [inputs] if isinstance(inputs, str) else inputs
    return [parts(model, {TEXT: text, **named}) for text in texts], isinstance(inputs, str)


def _adapter(model: Served, name: str | None) -> dict[str, Part]:
    """Returns the input that names the adapter, where the model has several; raises if it has no adapter of this name."""
    if ADAPTER not in model.inputs:
        return {}
    known = model.known.adapters
    if name is None or name not in known:
        given = "no adapter given" if name is None else f"adapter {name[:40]!r} given"
        raise Rejected(f"parameters: {given}; model {model.name} has {listed(known)}")
    return {ADAPTER: name}


def _check_parameters(model: Served, parameters: Parameters) -> None:
    """Refuses parameters that the task of a model does not have.

    Raises:
        Rejected: One is given.
    """
    names = set(parameters.model_dump(exclude_none=True)) - {"return_full_text", "details", "decoder_input_details", "watermark"}
    allowed = {*GENERATED, "do_sample"} if model.generates else {"function_to_apply", "top_k"} if model.classifies else set()
    allowed |= {"adapter"} if ADAPTER in model.inputs else set()
    if names - allowed:
        offered = ", ".join(sorted(allowed)) or "none"
        raise Rejected(f"parameters: {', '.join(sorted(names - allowed))} given; model {model.name} takes {offered}")
    if parameters.do_sample and not parameters.temperature:
        raise Rejected("parameters: do_sample needs a temperature above 0 here; give one")


def _decoded(inputs: object) -> bytes:
    try:
        return base64.b64decode(inputs if isinstance(inputs, str) else "", validate=True)
    except binascii.Error as error:
        raise Rejected("inputs: the bytes of a file in base64 are expected") from error


def _entities(text: str) -> Json:
    """Returns the entities of a row in the form of the pipeline; a tag of a single token is an `entity`, else it is an `entity_group`."""
    entities: list[Json] = []
    for one in json.loads(text):
        key = "entity" if one["entity"][1:2] == "-" else "entity_group"
        entities.append({key: one["entity"], "score": one["score"], "word": one["text"], "start": one["start"], "end": one["end"]})
    return entities


def _span(text: str) -> Json:
    answer = json.loads(text)
    return {"answer": answer["text"], "score": answer["probability"], "start": answer["start"], "end": answer["end"]}
