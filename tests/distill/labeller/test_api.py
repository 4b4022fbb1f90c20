"""A server with the API of OpenAI as labeller: a small one that answers by a tiny model, and the front of `compress serve`."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from distill.labeller.api import ApiScorer
from distill.labeller.causal import CausalScorer
from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked, Sampled
from tests.distill.labeller.test_causal import answers, asked, scorer
from tests.problems import raises_problem
from tests.triton_repo.apis.conftest import repository, served  # noqa: F401 - fixtures

pytestmark = pytest.mark.whole

KEY = "sk-a-secret"


class Small(ThreadingHTTPServer):
    """Answers completions and chats by the next tokens of a tiny model, as many as `listed`; keeps what it was sent."""

    def __init__(self, model: CausalScorer, listed: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.listed, self.bodies, self.keys = model, listed, list[Any](), set[str]()
        self.chat_tokens: dict[str, float] | None = None
        self.without_logprobs = False

    def next_tokens(self, prompt: str) -> dict[str, float]:
        ids = self.model.tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            log_p = self.model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        best = log_p.topk(min(self.listed, len(log_p)))
        return {self.model.tokenizer.decode([int(token)]): float(value) for value, token in zip(*best, strict=True)}


class Handler(BaseHTTPRequestHandler):
    """Routes of the small server."""

    server: Small

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.keys.add(self.headers["authorization"])
        if body["model"] != "tiny":
            return self._send(404, {"error": {"message": f"no model {body['model']}, asked with {self.headers['authorization']}"}})
        if self.path == "/v1/completions" and body.get("logprobs"):
            top = self.server.next_tokens(body["prompt"])
            logprobs: Any = None if self.server.without_logprobs else {"top_logprobs": [top], "tokens": [next(iter(top))]}
            return self._send(200, {"choices": [{"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}]})
        if self.path == "/v1/completions":
            finish = "length" if body["seed"] % 2 else "stop"
            return self._send(200, {"choices": [{"index": 0, "text": f" text {body['seed']}", "finish_reason": finish}]})
        listed = [{"token": token, "logprob": value, "bytes": None} for token, value in (self.server.chat_tokens or {}).items()]
        content = [{**listed[0], "top_logprobs": listed}]
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": content}}
        return self._send(200, {"choices": [choice]})

    def _send(self, status: int, document: Any) -> None:
        text = json.dumps({"id": "a", "object": "completion", "created": 0, "model": "tiny", **document}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def small() -> Iterator[Small]:
    with Small(scorer(), 290) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def api(server: Small, model: str = "tiny", key_variable: str | None = None) -> ApiScorer:
    return ApiScorer(f"http://127.0.0.1:{server.server_port}/v1", model, key_variable, "teacher")


@pytest.mark.slow
def test_words_have_the_scores_of_the_model_itself(small: Small) -> None:
    queries = asked("")[:4]
    ours, theirs = answers(api(small), queries), answers(scorer(), queries)
    np.testing.assert_allclose(ours[:, 0], theirs[:, 0], atol=2e-3)
    np.testing.assert_array_equal(ours[:, 1], theirs[:, 1])
    assert ours[:, 1].max() > 1
    assert {body["max_tokens"] for body in small.bodies} == {1}


def test_what_words_share_is_asked_once(small: Small) -> None:
    answers(api(small), asked("")[:1])
    prompts = [body["prompt"] for body in small.bodies]
    assert len(prompts) == len(set(prompts))


def test_a_token_that_is_not_listed_has_at_most_what_is_left(small: Small) -> None:
    small.listed = 2
    query = asked("")[0]
    listed = sorted(small.next_tokens(str(query.query.prompt)).values())
    bound = min(listed[0], math.log(1 - sum(map(math.exp, listed))))
    exact = answers(scorer(), [query])[0, 0]
    found = answers(api(small), [query])[0, 0]
    for value, true in zip(found, exact, strict=True):
        assert value == pytest.approx(bound, abs=1e-3) or value == pytest.approx(true, abs=1e-3)
    assert any(value == pytest.approx(bound, abs=1e-3) for value in found)


def test_a_chat_is_judged_by_first_tokens(small: Small) -> None:
    small.chat_tokens = {"Posit": -0.9, " Pos": -2.0, "The": -1.5, "Neg": -3.0}
    query = Asked(Query((("user", "fine"),), ""), ("Negative", "Positive", "Unlisted"))
    found = answers(api(small), [query])[0]
    left = math.log(1 - sum(map(math.exp, small.chat_tokens.values())))
    np.testing.assert_allclose(found[0], [-3.0, np.logaddexp(-0.9, -2.0), min(-3.0, left)], atol=1e-5)
    assert small.bodies[0]["messages"] == [{"role": "user", "content": "fine"}]


def test_a_first_token_of_two_words_is_refused(small: Small) -> None:
    small.chat_tokens = {"N": -0.1}
    with raises_problem("teacher.labels", "token", "Negative", "Neutral", "chat: false"):
        list(api(small).scores([Asked(Query((("user", "fine"),), ""), ("Negative", "Neutral"))]))


def test_texts_that_do_not_end_are_none(small: Small) -> None:
    found = api(small).texts(Query("A bad movie:", " "), 4, Sampled(1.0, 0.9, 8, 6))
    assert found == ["text 6", None, "text 8", None]
    assert {(body["temperature"], body["top_p"], body["max_tokens"], body["stop"]) for body in small.bodies} == {(1.0, 0.9, 8, "\n")}


def test_the_key_comes_from_the_environment(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABELLER_KEY", KEY)
    answers(api(small, key_variable="LABELLER_KEY"), asked("")[:1])
    assert small.keys == {f"Bearer {KEY}"}
    with raises_problem("teacher.url", "did not answer") as caught:
        list(api(small, "other", "LABELLER_KEY").scores(asked("")[:1]))
    assert KEY not in str(caught.value)


def test_a_key_that_is_not_set_is_named(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABELLER_KEY", raising=False)
    with raises_problem("teacher.key_variable", "LABELLER_KEY is not set"):
        api(small, key_variable="LABELLER_KEY")


def test_a_server_without_log_probabilities_is_refused(small: Small) -> None:
    small.without_logprobs = True
    with raises_problem("teacher.url", "no log-probabilities"):
        list(api(small).scores(asked("")[:1]))


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ApiScorer("http://127.0.0.1:1/v1", "tiny", None, "teacher")
    one.client = one.client.with_options(max_retries=0)
    with raises_problem("teacher.url", "http://127.0.0.1:1/v1 did not answer"):
        list(one.scores(asked("")[:1]))


def test_our_own_front_is_such_a_server(served: Any) -> None:  # noqa: F811
    query = Asked(Query("good is the word", ""), ("good", "bad"))

    async def ask(address: str) -> Any:
        return await asyncio.to_thread(lambda: answers(ApiScorer(f"{address}/v1", "story", None, "teacher"), [query]))

    found = served(ask, "story")
    assert found[0, 0, 0] == 0  # the model repeats the words of the prompt
    assert found[0, 0, 1] < -10
    assert found[0, 1].tolist() == [1, 1]
