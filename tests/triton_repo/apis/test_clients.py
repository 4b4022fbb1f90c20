"""LiteLLM, LangChain and LlamaIndex at the routes of OpenAI, before a stand-in for Triton. They are in no extra: what is missing is
skipped.

Installed with: pip install litellm langchain-openai llama-index-llms-openai-like llama-index-embeddings-openai-like
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from tests.triton_repo.apis.stand_in_triton import Triton, inputs_of, vector

pytestmark = pytest.mark.slow

TEXTS = ["a bad cab", "bead"]
ARGUMENTS = '{"a": 1}'
CALL = f'<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>'
CALLS = f'[{{"name": "add", "parameters": {ARGUMENTS}}}]'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds 1.", "parameters": PARAMETERS}}
Asking = Callable[[str], Any]


class Add(BaseModel):
    """Adds 1."""

    a: int


def add(a: int) -> int:
    """Adds 1."""
    return a + 1


def shortened(text: str, dimensions: int) -> list[float]:
    first = vector(text)[:dimensions]
    return [one / math.hypot(*first) for one in first]


@pytest.fixture
def asked(served: Any) -> Callable[..., Any]:
    """Calls a function, which waits, with the address of the front; returns what it returns."""

    def run(asking: Asking, *models: str, triton: Triton | None = None) -> Any:
        async def ask(address: str) -> Any:
            return await asyncio.to_thread(asking, f"{address}/v1")

        return served(ask, *(models or ("story",)), triton=triton)

    return run


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks GitHub when it is imported
    return pytest.importorskip("litellm", reason="litellm is not installed")


@pytest.fixture
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture
def llama_index() -> Any:
    return pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")


@pytest.mark.parametrize("model", ["openai/story", "hosted_vllm/story"])
def test_litellm_completes_conversations(model: str, litellm: Any, asked: Any) -> None:
    def ask(base: str) -> Any:
        given: dict[str, Any] = {"model": model, "api_base": base, "api_key": "none", "temperature": 0.5, "presence_penalty": 0.0}
        messages = [{"role": "user", "content": "once upon a SEED"}]
        whole = litellm.completion(messages=messages, n=2, seed=3, logprobs=True, top_logprobs=1, **given)
        stream = list(litellm.completion(messages=messages, seed=3, stream=True, stream_options={"include_usage": True}, **given))
        called = litellm.completion(messages=[{"role": "user", "content": CALL}], tools=[TOOL], **given).choices[0]
        return whole, stream, called

    whole, stream, called = asked(ask)
    assert [one.message.content for one in whole.choices] == ["once upon a 3", "once upon a 4"]
    assert [one.token for one in whole.choices[0].logprobs.content] == ["once", " upon", " a", " 3"]
    assert "".join(one.choices[0].delta.content or "" for one in stream if one.choices) == "once upon a 3"
    assert whole.usage.completion_tokens == 8
    assert stream[-1].usage.total_tokens == 8
    assert called.finish_reason == "tool_calls"
    assert (called.message.tool_calls[0].function.name, called.message.tool_calls[0].function.arguments) == ("add", ARGUMENTS)


def test_litellm_completes_texts(litellm: Any, asked: Any) -> None:
    def ask(base: str) -> Any:
        given: dict[str, Any] = {"model": "text-completion-openai/story", "prompt": "once upon", "api_base": base, "api_key": "none"}
        stream = litellm.text_completion(stream=True, **given)
        return litellm.text_completion(logprobs=1, **given).choices[0], "".join(one.choices[0].text or "" for one in stream)

    choice, text = asked(ask)
    assert choice.text == text == "once upon"
    assert choice.logprobs.tokens == ["once", " upon"]


def test_litellm_makes_vectors_and_ranks(litellm: Any, asked: Any) -> None:
    def ask(base: str) -> Any:
        given: dict[str, Any] = {"api_base": base, "api_key": "none"}
        vectors = litellm.embedding(model="openai/vectors", input=TEXTS, **given)
        short = litellm.embedding(model="openai/vectors", input=TEXTS, dimensions=3, allowed_openai_params=["dimensions"], **given)
        ranked = litellm.rerank(
            model="huggingface/reranker", query="abc", documents=["x", "abc"], api_base=base.removesuffix("/v1"), api_key="none"
        )
        return *([one["embedding"] for one in found.data] for found in (vectors, short)), ranked.results

    vectors, short, ranked = asked(ask, "vectors", "reranker")
    assert vectors == [vector(text) for text in TEXTS]
    for found, text in zip(short, TEXTS, strict=True):
        assert found == pytest.approx(shortened(text, 3), rel=1e-6)
    assert [one["index"] for one in ranked] == [1, 0]


def test_langchain_completes_conversations(langchain: Any, asked: Any) -> None:
    triton = Triton()

    def ask(base: str) -> Any:
        given: dict[str, Any] = {"model": "story", "base_url": base, "api_key": "none", "max_retries": 0}
        chat = langchain.ChatOpenAI(temperature=0.5, seed=3, max_tokens=4, frequency_penalty=0.0, stream_usage=True, **given)
        whole, stream = chat.invoke("once upon a SEED time"), list(chat.stream("once upon a SEED time"))
        listed = langchain.ChatOpenAI(logprobs=True, top_logprobs=2, **given).invoke("a b").response_metadata["logprobs"]
        return whole, stream, [one["token"] for one in listed["content"]]

    whole, stream, listed = asked(ask, triton=triton)
    assert whole.content == "".join(one.content for one in stream) == "once upon a 3"
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 4
    assert [one.usage_metadata["output_tokens"] for one in stream if one.usage_metadata] == [4]
    assert inputs_of(triton.requests[0])["MAX_TOKENS"] == 4
    assert listed == ["a", " b"]


def test_langchain_calls_functions_and_reads_structures(langchain: Any, asked: Any) -> None:
    messages = pytest.importorskip("langchain_core.messages")

    def ask(base: str) -> Any:
        chat = langchain.ChatOpenAI(model="story", base_url=base, api_key="none", max_retries=0)
        bound = chat.bind_tools([TOOL])
        first = bound.invoke(CALL)
        result = messages.ToolMessage("2", tool_call_id=first.tool_calls[0]["id"])
        last = bound.invoke([messages.HumanMessage(CALL), first, result, messages.HumanMessage("thanks")])
        stream = [call for piece in bound.stream(CALL) for call in piece.tool_calls]
        forced = [
            chat.bind_tools([TOOL], tool_choice="any").invoke(CALLS).tool_calls,
            chat.bind_tools([TOOL], tool_choice="add").invoke(ARGUMENTS).tool_calls,
        ]
        read = [chat.with_structured_output(Add, method=one).invoke(ARGUMENTS) for one in ("json_schema", "function_calling", "json_mode")]
        return first.tool_calls, last.content, stream, forced, read

    first, last, stream, forced, read = asked(ask)
    assert [(one["name"], one["args"]) for one in (*first, *stream, *forced[0], *forced[1])] == [("add", {"a": 1})] * 4
    assert last == "thanks"
    assert read == [Add(a=1)] * 3


def test_langchain_completes_texts_and_makes_vectors(langchain: Any, asked: Any) -> None:
    def ask(base: str) -> Any:
        given: dict[str, Any] = {"base_url": base, "api_key": "none", "max_retries": 0}
        text = langchain.OpenAI(model="story", temperature=1, seed=5, **given)
        several = langchain.OpenAI(model="story", temperature=1, seed=5, n=2, **given).generate(["a SEED", "b SEED"]).generations
        vectors = langchain.OpenAIEmbeddings(model="vectors", check_embedding_ctx_length=False, **given)
        short = langchain.OpenAIEmbeddings(model="vectors", dimensions=3, check_embedding_ctx_length=False, **given)
        return (
            [text.invoke("once SEED"), "".join(text.stream("once SEED"))],
            [[one.text for one in answers] for answers in several],
            [*vectors.embed_documents(TEXTS), vectors.embed_query(TEXTS[0])],
            short.embed_query(TEXTS[0]),
        )

    texts, several, vectors, short = asked(ask, "story", "vectors")
    assert texts == ["once 5", "once 5"]
    assert several == [["a 5", "a 6"], ["b 5", "b 6"]]
    assert vectors == [vector(text) for text in (*TEXTS, TEXTS[0])]
    assert short == pytest.approx(shortened(TEXTS[0], 3), rel=1e-6)


def test_llama_index_completes_conversations_and_texts(llama_index: Any, asked: Any) -> None:
    core = pytest.importorskip("llama_index.core.llms")

    def ask(base: str) -> Any:
        given: dict[str, Any] = {
            "model": "story",
            "api_base": base,
            "api_key": "none",
            "max_retries": 0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        message, texts = core.ChatMessage(role="user", content="once upon a"), []
        chat, text = (llama_index.OpenAILike(is_chat_model=one, **given) for one in (True, False))
        whole, completed = chat.chat([message]), text.complete("once upon a")
        texts += [whole.message.content, "".join(one.delta or "" for one in chat.stream_chat([message]))]
        texts += [completed.text, "".join(one.delta or "" for one in text.stream_complete("once upon a"))]
        return texts, [len(one.logprobs) for one in (whole, completed)]

    assert asked(ask) == (["once upon a"] * 4, [3, 3])


def test_llama_index_calls_functions_and_reads_structures(llama_index: Any, asked: Any) -> None:
    tools = pytest.importorskip("llama_index.core.tools")

    def ask(base: str) -> Any:
        given: dict[str, Any] = {"model": "story", "api_base": base, "api_key": "none", "max_retries": 0, "is_chat_model": True}
        chat = llama_index.OpenAILike(is_function_calling_model=True, **given)
        tool = tools.FunctionTool.from_defaults(add)
        required = chat.get_tool_calls_from_response(chat.chat_with_tools([tool], user_msg=CALLS, tool_required=True))
        read = chat.as_structured_llm(Add).complete(f'[{{"name": "Add", "parameters": {ARGUMENTS}}}]').raw
        return chat.predict_and_call([tool], user_msg=CALL).response, [(one.tool_name, one.tool_kwargs) for one in required], read

    assert asked(ask) == ("2", [("add", {"a": 1})], Add(a=1))


def test_llama_index_without_functions_asks_for_a_call_of_none(llama_index: Any, asked: Any) -> None:
    """It sends tool_choice `required` without tools, which OpenAI refuses as well."""

    def ask(base: str) -> str:
        given: dict[str, Any] = {"model": "story", "api_base": base, "api_key": "none", "max_retries": 0, "is_chat_model": True}
        with pytest.raises(Exception, match="tool_choice: given without tools") as caught:
            llama_index.OpenAILike(**given).as_structured_llm(Add).complete(ARGUMENTS)
        return type(caught.value).__name__

    assert asked(ask) == "BadRequestError"


def test_llama_index_makes_vectors(asked: Any) -> None:
    embeddings = pytest.importorskip("llama_index.embeddings.openai_like", reason="llama-index-embeddings-openai-like is not installed")

    def ask(base: str) -> Any:
        given: dict[str, Any] = {"model_name": "vectors", "api_base": base, "api_key": "none"}
        whole, short = embeddings.OpenAILikeEmbedding(**given), embeddings.OpenAILikeEmbedding(dimensions=3, **given)
        return whole.get_text_embedding_batch(TEXTS), short.get_query_embedding(TEXTS[0])

    vectors, short = asked(ask, "vectors")
    assert vectors == [vector(text) for text in TEXTS]
    assert short == pytest.approx(shortened(TEXTS[0], 3), rel=1e-6)
