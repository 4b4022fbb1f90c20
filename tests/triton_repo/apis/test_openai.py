"""`/v1` by the client of OpenAI: answers are those of the model, errors come in its schema, streams hold the same text as whole answers."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from tests.triton_repo.apis.stand_in_triton import MOST_ROWS, TOKENS, Triton, inputs_of, vector

TEXTS = ["a bad cab", "bead", "a", "fade a face", "h", "g g g g g g g g g g g"]


def client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
def test_embeddings_are_the_vectors_of_the_model(encoding: Any, served: Any) -> None:
    triton = Triton()

    async def ask(address: str) -> Any:
        return await client(address).embeddings.create(model="vectors", input=TEXTS, encoding_format=encoding)

    answer = served(ask, "vectors", triton=triton)
    found = [
        np.frombuffer(base64.b64decode(one.embedding), "<f4").tolist() if isinstance(one.embedding, str) else one.embedding
        for one in answer.data
    ]
    assert found == [vector(text) for text in TEXTS]
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(min(TOKENS, len(text.split())) for text in TEXTS)
    assert len(triton.requests) == -(-len(TEXTS) // MOST_ROWS)
    assert answer.model == "vectors"


def test_shorter_embeddings_are_the_first_numbers_at_length_1(served: Any) -> None:
    async def ask(address: str) -> Any:
        return await client(address).embeddings.create(model="vectors", input="a bad cab", dimensions=3)

    expected = np.array(vector("a bad cab")[:3])
    np.testing.assert_allclose(served(ask, "vectors").data[0].embedding, expected / np.linalg.norm(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "status", "named"),
    [
        ({"model": "other"}, 404, "other"),
        ({"model": "polarity"}, 400, "polarity"),
        ({"input": [[1, 2], [3]]}, 400, "input"),
        ({"input": [1, 2]}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"dimensions": 9}, 400, "dimensions"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"extra_body": {"normalise": True}}, 400, "normalise"),
        ({"encoding_format": "float16"}, 400, "encoding_format"),
    ],
)
def test_what_is_wrong_with_embeddings_is_named(values: dict[str, Any], status: int, named: str, served: Any) -> None:
    async def ask(address: str) -> Any:
        with pytest.raises(openai.APIStatusError) as caught:
            await client(address).embeddings.create(**{"model": "vectors", "input": "a", **values})
        return caught.value

    error = served(ask, "vectors", "polarity")
    assert error.status_code == status
    assert named in error.body["message"]
    assert error.body["type"] == "invalid_request_error"
    assert error.body["code"] == ("model_not_found" if status == 404 else None)


def test_models_are_listed_and_described(served: Any) -> None:
    async def ask(address: str) -> Any:
        return [one.id async for one in client(address).models.list()], (await client(address).models.retrieve("vectors")).id

    assert served(ask, "vectors", "story") == (["vectors", "story"], "vectors")


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_tokens": 2}, {"MAX_TOKENS": 2}),
    ({"max_completion_tokens": 2}, {"MAX_TOKENS": 2}),
    ({"temperature": 0, "top_p": 0.5, "seed": 3}, {"TEMPERATURE": 0.0}),
    ({"temperature": 0.5, "top_p": 0.5, "seed": 3}, {"TEMPERATURE": 0.5, "TOP_P": 0.5, "SEED": 3}),
    ({"stop": "b"}, {"STOP": ["b"]}),
    ({"stop": ["b", "c"]}, {"STOP": ["b", "c"]}),
    ({"n": 1, "user": "me", "response_format": {"type": "text"}, "logprobs": False}, {}),
]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("asked", "inputs"), SETTINGS)
def test_answers_and_settings_are_those_of_the_model(
    chat: bool, stream: bool, asked: dict[str, Any], inputs: dict[str, Any], served: Any
) -> None:
    if not chat:
        asked = {key: value for key, value in asked.items() if key not in ("max_completion_tokens", "response_format", "logprobs")}
        inputs = inputs if asked or not inputs else {}
    triton, prompt = Triton(), "once upon a time"

    async def ask(address: str) -> tuple[str, str, Any]:
        given: dict[str, Any] = {"model": "story", **asked}
        if stream:
            given |= {"stream": True, "stream_options": {"include_usage": True}}
        calls = client(address).chat.completions if chat else client(address).completions
        given |= {"messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}]} if chat else {"prompt": prompt}
        answer = await calls.create(**given)
        if not stream:
            choice = answer.choices[0]
            return choice.message.content if chat else choice.text, choice.finish_reason, answer.usage
        pieces = [piece async for piece in answer]
        assert all(piece.id == pieces[0].id for piece in pieces)
        assert all(piece.usage is None for piece in pieces[:-1])
        choices = [piece.choices[0] for piece in pieces if piece.choices]
        assert all(choice.finish_reason is None for choice in choices[:-1])
        if chat:
            assert choices[0].delta.role == "assistant"
            assert choices[-1].delta.content is None
        text = "".join((choice.delta.content or "") if chat else choice.text for choice in choices)
        return text, choices[-1].finish_reason, pieces[-1].usage

    text, reason, usage = served(ask, "story", triton=triton)
    most = inputs.get("MAX_TOKENS", 4)
    assert (text, reason) == (" ".join(prompt.split(" ")[:most]), "length" if most < 4 else "stop")
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, most, 4 + most)
    sent = inputs_of(triton.requests[0])
    assert sent.pop("STREAM") is stream
    assert (sent.pop("MESSAGES") if chat else sent.pop("TEXT")) == ('[{"role": "user", "content": "once upon a time"}]' if chat else prompt)
    assert sent == inputs


SCHEMA = {"type": "object", "properties": {"na\u00efve": {"type": "integer"}}}
STRUCTURES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"JSON_SCHEMA": {"type": "object"}}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, {"JSON_SCHEMA": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"JSON_SCHEMA": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"JSON_SCHEMA": SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, {"JSON_SCHEMA": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a|b"}}, {"REGEX": "a|b"}),
    ({"structured_outputs": {"choice": ["yes", "n.o"]}}, {"REGEX": "yes|n\\x{2e}o"}),
    ({"guided_json": SCHEMA}, {"JSON_SCHEMA": SCHEMA}),
    ({"guided_regex": "a+"}, {"REGEX": "a+"}),
    ({"guided_choice": ["yes"]}, {"REGEX": "yes"}),
]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("asked", "inputs"), STRUCTURES)
def test_what_an_answer_has_to_be_reaches_the_model(chat: bool, asked: dict[str, Any], inputs: dict[str, Any], served: Any) -> None:
    triton = Triton()

    async def ask(address: str) -> None:
        if chat:
            await client(address).chat.completions.create(model="story", messages=[{"role": "user", "content": "a"}], extra_body=asked)
        else:
            await client(address).completions.create(model="story", prompt="a", extra_body=asked)

    served(ask, "story", triton=triton)
    sent = inputs_of(triton.requests[0])
    found = {name: sent[name] for name in ("JSON_SCHEMA", "REGEX") if name in sent}
    assert {name: json.loads(text) if name == "JSON_SCHEMA" else text for name, text in found.items()} == inputs


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("most", [None, 0, 2, 3])
def test_log_probabilities_of_a_conversation_are_those_of_the_model(most: int | None, stream: bool, served: Any) -> None:
    triton = Triton()

    async def ask(address: str) -> Any:
        messages: Any = [{"role": "user", "content": "once upon a"}]
        more: Any = {} if most is None else {"top_logprobs": most}
        answer = await client(address).chat.completions.create(model="story", messages=messages, logprobs=True, stream=stream, **more)
        return [piece.choices[0] async for piece in answer] if stream else answer.choices

    choices = served(ask, "story", triton=triton)
    assert inputs_of(triton.requests[0])["LOGPROBS"] == (most or 0)
    content = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert [one.token for one in content] == ["once", " upon", " a"]
    assert [one.logprob for one in content] == [0, -1 / 8, -2 / 8]
    assert [bytes(one.bytes).decode() for one in content] == ["once", " upon", " a"]
    best = [[(one.token, one.bytes) for one in token.top_logprobs] for token in content]
    assert best == [[("\\xe2", [0xE2]), ("<end>", None), (word, list(word.encode()))][: most or 0] for word in ("once", " upon", " a")]
    if stream:  # each word comes with its own, and the end without one
        words = [(choice.delta.content, choice.logprobs.content[0].token) for choice in choices if choice.logprobs]
        assert words == [(word, word) for word in ("once", " upon", " a")]
        assert choices[-1].logprobs is None
        assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("most", [0, 2, 3])
def test_log_probabilities_of_a_completion_are_those_of_the_model(most: int, stream: bool, served: Any) -> None:
    async def ask(address: str) -> Any:
        answer = await client(address).completions.create(model="story", prompt="once upon a", logprobs=most, stream=stream)
        return [piece.choices[0] async for piece in answer] if stream else answer.choices

    found = [choice.logprobs for choice in served(ask, "story")]
    words = ["once", " upon", " a"]
    assert [token for one in found for token in one.tokens] == words
    assert [value for one in found for value in one.token_logprobs] == [0, -1 / 8, -2 / 8]
    assert [place for one in found for place in one.text_offset] == [0, 4, 9]
    names = [sorted(best) for one in found for best in one.top_logprobs]
    assert names == [sorted({*["bytes:\\xe2", "<end>"][:most], word}) for word in words]


def test_an_answer_without_log_probabilities_has_none(served: Any) -> None:
    triton = Triton()

    async def ask(address: str) -> Any:
        return await client(address).completions.create(model="story", prompt="once upon")

    assert served(ask, "story", triton=triton).choices[0].logprobs is None
    assert "LOGPROBS" not in inputs_of(triton.requests[0])


@pytest.mark.parametrize("most", [6, -1, True])
def test_more_log_probabilities_than_a_completion_has_are_refused(most: Any, served: Any) -> None:
    async def ask(address: str) -> Any:
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client(address).completions.create(model="story", prompt="a", logprobs=most)
        return True

    assert served(ask, "story")


def test_several_prompts_have_an_answer_each(served: Any) -> None:
    async def ask(address: str) -> Any:
        return await client(address).completions.create(model="story", prompt=["a b", "c", "d e f"])

    answer = served(ask, "story")
    assert [(one.index, one.text) for one in answer.choices] == [(0, "a b"), (1, "c"), (2, "d e f")]
    assert answer.usage.completion_tokens == 6


def joined(pieces: list[Any], chat: bool) -> dict[int, tuple[str, str]]:
    """The text and the reason of each choice of a stream."""
    found: dict[int, tuple[str, str]] = {}
    for choice in (choice for piece in pieces for choice in piece.choices):
        if chat and choice.index not in found:
            assert choice.delta.role == "assistant"
        text, reason = found.get(choice.index, ("", None))
        assert reason is None, "nothing comes after the reason"
        found[choice.index] = (text + ((choice.delta.content or "") if chat else choice.text), choice.finish_reason)
    return found


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("given", "seeds"), [({"temperature": 0.5, "seed": 7}, (7, 8, 9)), ({"temperature": 0.5}, (0, 1, 2)), ({"seed": 7}, (None,) * 3)]
)
def test_several_answers_are_sampled_with_seeds_of_their_own(
    chat: bool, stream: bool, given: dict[str, Any], seeds: tuple[int | None, ...], served: Any
) -> None:
    async def ask(address: str) -> Any:
        calls = client(address).chat.completions if chat else client(address).completions
        prompt: Any = {"messages": [{"role": "user", "content": "a SEED b"}]} if chat else {"prompt": "a SEED b"}
        more: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await calls.create(model="story", n=3, **prompt, **given, **more)
        if not stream:
            return {one.index: (one.message.content if chat else one.text, one.finish_reason) for one in answer.choices}, answer.usage
        pieces = [piece async for piece in answer]
        order = [choice.index for piece in pieces for choice in piece.choices]
        assert order != sorted(order), "they come in turn"
        return joined(pieces, chat), pieces[-1].usage

    found, usage = served(ask, "story")
    assert found == {index: (f"a {seed} b", "stop") for index, seed in enumerate(seeds)}
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 9, 12)


@pytest.mark.parametrize("stream", [True, False])
def test_answers_to_several_prompts_come_in_the_order_of_the_prompts(stream: bool, served: Any) -> None:
    async def ask(address: str) -> Any:
        more: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await client(address).completions.create(model="story", prompt=["a SEED", "b b SEED"], n=2, temperature=1, **more)
        if not stream:
            return {one.index: one.text for one in answer.choices}, answer.usage
        pieces = [piece async for piece in answer]
        return {index: text for index, (text, _) in joined(pieces, chat=False).items()}, pieces[-1].usage

    found, usage = served(ask, "story")
    assert found == {0: "a 0", 1: "a 1", 2: "b b 0", 3: "b b 1"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 10)


@pytest.mark.parametrize(("given", "named"), [({"n": 2, "best_of": 1}, "best_of: 1 given with n 2"), ({"best_of": 2}, "best_of")])
def test_the_best_of_several_answers_is_refused(given: dict[str, Any], named: str, served: Any) -> None:
    async def ask(address: str) -> Any:
        with pytest.raises(openai.BadRequestError, match=named):
            await client(address).completions.create(model="story", prompt="a", **given)
        return True

    assert served(ask, "story")


def test_more_answers_than_are_written_at_once_are_refused(served: Any) -> None:
    async def ask(address: str) -> Any:
        with pytest.raises(openai.BadRequestError, match="n: 8 given with 9 prompts; at most 64 answers are allowed"):
            await client(address).completions.create(model="story", prompt=["a"] * 9, n=8)
        return len((await client(address).completions.create(model="story", prompt=["a"] * 8, n=8)).choices)

    assert served(ask, "story") == 64


def test_token_ids_are_a_prompt(served: Any) -> None:
    async def ask(address: str) -> Any:
        return await client(address).completions.create(model="story", prompt=[5, 6])

    assert served(ask, "story").choices[0].text == "5 6"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"n": 9}, "n:"),
        ({"n": 0}, "n:"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs: 2 given without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: /a/"}}}, "structured_outputs.grammar"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}}, "response_format and guided_regex"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": "a"}}}, "structured_outputs.json and structured_outputs.regex"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused_and_named(values: dict[str, Any], named: str, served: Any) -> None:
    async def ask(address: str) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            await client(address).chat.completions.create(**{"model": "story", "messages": [{"role": "user", "content": "a"}], **values})
        return caught.value

    assert served(ask, "story").body["message"].startswith(named)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("refuses", "kind"),
    [("MAX_TOKENS 5 are more than the context", openai.BadRequestError), ("the model failed: no memory", openai.InternalServerError)],
)
def test_what_the_model_refuses_has_its_status(stream: bool, refuses: str, kind: type[Exception], served: Any) -> None:
    async def ask(address: str) -> None:
        with pytest.raises(kind, match=refuses):
            await client(address).chat.completions.create(model="story", messages=[{"role": "user", "content": "a"}], stream=stream)

    served(ask, "story", triton=Triton(refuses))


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_answers(n: int, served: Any) -> None:
    triton = Triton(seconds=0.02)

    async def ask(address: str) -> int:
        stream = await client(address).completions.create(model="story", prompt="a " * 500, n=n, stream=True)
        async for _ in stream:
            break
        await stream.close()
        for _ in range(100):
            if triton.ended == n:
                break
            await asyncio.sleep(0.02)
        return triton.ended

    assert served(ask, "story", triton=triton) == n


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": "vectors"', b'{"model": "vectors", "input": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_an_error_of_the_client(body: bytes, served: Any) -> None:
    async def ask(address: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.post(f"{address}/v1/embeddings", data=body) as response:
            return response.status, await response.json()

    status, document = served(ask, "vectors")
    assert status == 400
    assert document["error"]["type"] == "invalid_request_error"
