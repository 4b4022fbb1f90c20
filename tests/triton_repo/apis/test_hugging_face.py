"""`/models/NAME` by the client of Hugging Face, and the routes of Text Embeddings Inference: answers are those of the model."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.triton_repo.apis.stand_in_triton import Triton, logits, shared, vector


def client(address: str, model: str) -> AsyncInferenceClient:
    return AsyncInferenceClient(model=f"{address}/models/{model}", token="none")


def softmax(values: list[float]) -> list[float]:
    powers = np.exp(np.array(values) - max(values))
    return list(powers / powers.sum())


def test_labels_with_their_scores_the_best_first(served: Any) -> None:
    async def ask(address: str) -> Any:
        return await client(address, "polarity").text_classification("ee e"), await client(address, "topics").text_classification("ee e")

    polarity, topics = served(ask, "polarity", "topics")
    assert [one.label for one in polarity] == ["good", "bad"]
    np.testing.assert_allclose([one.score for one in polarity], softmax(logits("ee e")), rtol=1e-6)
    np.testing.assert_allclose([one.score for one in topics], 1 / (1 + np.exp(-np.array(logits("ee e")))), rtol=1e-6)


@pytest.mark.parametrize(("function", "expected"), [("none", [2.0, 1.0]), ("sigmoid", [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1))])])
def test_scores_are_made_as_asked(function: Any, expected: list[float], served: Any) -> None:
    async def ask(address: str) -> Any:
        return await client(address, "polarity").text_classification("xe", function_to_apply=function)

    np.testing.assert_allclose([one.score for one in served(ask, "polarity")], expected, rtol=1e-6)


def test_an_adapter_is_named_as_a_parameter_and_never_left_out(served: Any) -> None:
    async def ask(address: str) -> Any:
        found = []
        async with aiohttp.ClientSession() as session:
            for parameters in ({"adapter": "a"}, {"adapter": "b"}, {"adapter": "c"}, {}):
                body = {"inputs": ["x", "xyz"], "parameters": {"function_to_apply": "none", **parameters}}
                async with session.post(f"{address}/models/shops", json=body) as response:
                    found.append((response.status, await response.json()))
            async with session.post(f"{address}/models/polarity", json={"inputs": "x", "parameters": {"adapter": "a"}}) as response:
                found.append((response.status, await response.json()))
        return found

    first, second, *refused = served(ask, "shops", "polarity")
    for (status, rows), other in ((first, 0.0), (second, 2.0)):
        assert status == 200
        assert [{one["label"]: one["score"] for one in row} for row in rows] == [{"x": 1.0, "y": other}, {"x": 3.0, "y": other}]
    assert [status for status, _ in refused] == [400, 400, 400]
    assert all("a, b" in json.dumps(answer) for _, answer in refused[:2])


def test_a_value_is_no_probability(served: Any) -> None:
    async def ask(address: str) -> Any:
        return await client(address, "value").text_classification("four")

    assert [one.score for one in served(ask, "value")] == [4.0]


@pytest.mark.whole
def test_entities_answers_vectors_and_texts(served: Any) -> None:
    async def ask(address: str) -> Any:
        entities = await client(address, "entities").token_classification("an Alice and Bob")
        answer = await client(address, "questions").question_answering(question="who?", context="Alice did")
        vectors = await client(address, "vectors").feature_extraction(["a bad cab", "b"])
        cosines = await client(address, "vectors").sentence_similarity("a", ["ab", "b"])
        text = await client(address, "story").text_generation("a b c", max_new_tokens=2)
        chat = await client(address, "story").chat_completion([{"role": "user", "content": "d e"}])
        return entities, answer, vectors, cosines, text, chat

    entities, answer, vectors, cosines, text, chat = served(ask, "entities", "questions", "vectors", "story")
    assert [(one.entity_group, one.word, one.start, one.end, one.score) for one in entities] == [
        ("NAME", "Alice", 3, 8, 0.5),
        ("NAME", "Bob", 13, 16, 0.5),
    ]
    assert (answer.answer, answer.start, answer.end, answer.score) == ("Alice", 0, 5, 0.75)
    assert np.asarray(vectors).tolist() == [vector("a bad cab"), vector("b")]
    np.testing.assert_allclose(cosines, [0.5**0.5, 0.0], atol=1e-6)
    assert text == "a b"
    assert chat.choices[0].message.content == "d e"


@pytest.mark.parametrize(
    ("model", "document", "named"),
    [
        ("polarity", {"inputs": {"text": "a", "text_pair": "b"}}, "polarity"),
        ("reranker", {"inputs": "a"}, "reranker"),
        ("vectors", {"inputs": "a", "parameters": {"top_k": 1}}, "top_k"),
        ("polarity", {"inputs": "a", "parameters": {"max_new_tokens": 1}}, "max_new_tokens"),
        ("story", {"inputs": ["a", "b"]}, "inputs"),
        ("polarity", {"inputs": []}, "inputs"),
        ("polarity", {"text": "a"}, "text"),
    ],
)
def test_what_a_model_does_not_take_is_named(model: str, document: Any, named: str, served: Any) -> None:
    async def ask(address: str) -> tuple[int, Any]:
        return await post(address, f"/models/{model}", document)

    status, answer = served(ask, "polarity", "reranker", "vectors", "story")
    assert status == 400
    assert named in answer["error"]


def test_an_unknown_model_is_an_error_of_the_client(served: Any) -> None:
    async def ask(address: str) -> int:
        with pytest.raises(HfHubHTTPError) as caught:
            await client(address, "other").text_classification("a")
        return caught.value.response.status_code

    assert served(ask, "polarity") == 404


async def post(address: str, path: str, document: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{address}{path}", data=json.dumps(document)) as response:
        return response.status, await response.json()


def test_vectors_by_the_routes_of_text_embeddings_inference(served: Any) -> None:
    texts = ["a bad cab", "b", "a", "cc"]

    async def ask(address: str) -> Any:
        return [
            (await post(address, "/embed", body))[1]
            for body in ({"inputs": texts}, {"inputs": texts, "normalize": False}, {"inputs": texts[0]}, {"inputs": texts, "dimensions": 2})
        ]

    unit, raw, single, short = served(ask, "vectors", "polarity")
    expected = np.array([vector(text) for text in texts])
    assert raw == expected.tolist()
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(single, unit[:1], rtol=1e-6)
    np.testing.assert_allclose(short[0], np.array([3, 2]) / 13**0.5, rtol=1e-6)
    assert short[3] == [0.0, 0.0]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("return_text", [True, False])
def test_texts_are_ranked_the_best_first_ties_in_their_order(raw: bool, return_text: bool, served: Any) -> None:
    query, texts = "abc", ["xyz", "ab", "abc", "cb", "c", "zz"]

    async def ask(address: str) -> Any:
        return await post(address, "/rerank", {"query": query, "texts": texts, "raw_scores": raw, "return_text": return_text})

    status, found = served(ask, "reranker", "polarity")
    values = [shared(query, text) if raw else 1 / (1 + np.exp(-shared(query, text))) for text in texts]
    assert status == 200
    assert [one["index"] for one in found] == sorted(range(len(texts)), key=lambda index: -values[index])
    np.testing.assert_allclose([one["score"] for one in found], sorted(values, reverse=True), rtol=1e-6)
    assert [one.get("text") for one in found] == [texts[one["index"]] if return_text else None for one in found]


def test_labels_by_the_routes_of_text_embeddings_inference(served: Any) -> None:
    async def ask(address: str) -> Any:
        single = await post(address, "/predict", {"inputs": "ee e"})
        batch = await post(address, "/predict", {"inputs": [["ee e"], ["a"]], "raw_scores": True})
        wrong = await post(address, "/predict", {"inputs": ["ee", "e"]})
        return single, batch, wrong

    single, batch, wrong = served(ask, "polarity", "vectors")
    assert [one["label"] for one in single[1]] == ["good", "bad"]
    np.testing.assert_allclose([one["score"] for one in single[1]], softmax(logits("ee e")), rtol=1e-6)
    assert [[one["score"] for one in row] for row in batch[1]] == [[4.0, 3.0], [1.0, 0.0]]
    assert (wrong[0], wrong[1]["error_type"]) == (400, "validation")


def test_a_model_is_named_where_several_fit(served: Any) -> None:
    async def ask(address: str) -> Any:
        return [await post(address, "/predict", {"inputs": "ee", **more}) for more in ({}, {"model": "polarity"}, {"model": "vectors"})]

    several, named, unfit = served(ask, "polarity", "topics", "vectors")
    assert several[0] == 400
    assert "polarity, topics" in several[1]["error"]
    assert named[0] == 200
    assert (unfit[0], "vectors" in unfit[1]["error"]) == (400, True)


def test_long_texts_are_refused_where_they_must_not_be_truncated(served: Any) -> None:
    async def ask(address: str) -> Any:
        longer = "a " * 9
        return [
            (await post(address, "/embed", {"inputs": ["a", longer], **more}))[0] for more in ({}, {"truncate": True}, {"truncate": False})
        ]

    assert served(ask, "vectors") == [200, 200, 413]


def test_an_overloaded_model_says_so_in_the_words_of_each_api(served: Any) -> None:
    async def ask(address: str) -> Any:
        return [
            await post(address, path, body)
            for path, body in (
                ("/embed", {"inputs": "a"}),
                ("/v1/embeddings", {"model": "vectors", "input": "a"}),
                ("/models/vectors", {"inputs": "a"}),
            )
        ]

    class Full(Triton):
        async def _infer(self, request: Any, timeout: float) -> bytes:
            import grpc

            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="maximum queue size")

    tei, v1, plain = served(ask, "vectors", triton=Full())
    assert (tei[0], tei[1]["error_type"]) == (429, "overloaded")
    assert (v1[0], v1[1]["error"]["type"]) == (503, "server_error")
    assert (plain[0], set(plain[1])) == (503, {"error"})


def test_what_is_served_and_whether_it_is_ready(served: Any) -> None:
    async def ask(address: str) -> Any:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{address}/health") as response:
                ready = response.status
            async with session.get(f"{address}/info") as response:
                return ready, await response.json()

    ready, info = served(ask, "polarity")
    assert ready == 200
    assert info["model_id"] == "polarity"
    assert info["model_type"]["classifier"]["id2label"] == {"0": "good", "1": "bad"}
    assert info["max_input_length"] == 8
