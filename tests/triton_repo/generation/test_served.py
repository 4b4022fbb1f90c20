"""Language models in the real server, behind the front. Needs the server environment."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc import service_pb2 as pb

from compress.core.engines import served_on
from tests.triton_repo.generation import tiny_language as tiny
from triton_repo import environment, layout
from triton_repo.client import RequestError
from triton_repo.config import from_text, to_text
from triton_repo.generation.client import LanguageClient, Piece, inputs
from triton_repo.generation.layout import write_language_repository
from triton_repo.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGED, STATEFUL = "llama-fp32", "mistral-fp32"
KINDS = {PAGED: "llama", STATEFUL: "mistral"}
WAITING = 3
RUNNING = 8
LONG = {"max_tokens": 230, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("language")
    exported = tiny.export(root / "export", (("llama", "paged"), ("mistral", "stateful")))
    models = layout.served_models(exported, served_on("cpu", generates=True))
    write_language_repository(root / "repository", models, batch_sizes=(1, RUNNING))
    for name in KINDS:
        path = root / "repository" / name / "config.pbtxt"
        config = from_text(path.read_text())
        config.parameters["max_waiting"].string_value = str(WAITING)
        path.write_text(to_text(config))
    with Service(root / "repository", environment.check(), root / "log") as started:
        yield started


def pieces(running: Service, model: str, **asked: Any) -> list[Piece]:
    with LanguageClient(running.grpc_address, model, seconds=60) as client:
        return list(client.stream(**asked))


def tokens(found: list[Piece]) -> list[int]:
    return [token for piece in found for token in piece.tokens]


def text(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


@pytest.mark.parametrize("model", KINDS)
def test_tokens_are_those_of_transformers(running: Service, model: str) -> None:
    for prompt in tiny.prompts((1, 9, 40)):
        found = pieces(running, model, ids=prompt, max_tokens=40, ignore_eos=True)
        assert tokens(found) == tiny.greedy(KINDS[model], prompt, 40)
        assert text(found) == tiny.tokenizer().decode(tokens(found), skip_special_tokens=True)
        assert len([piece for piece in found if piece.tokens]) == 40  # each token as it comes
        last = found[-1]
        assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", len(prompt), 40)
        assert all(piece.finish_reason is None for piece in found[:-1])


@pytest.mark.parametrize("model", KINDS)
def test_streams_side_by_side_are_those_of_each_alone(running: Service, model: str) -> None:
    count = RUNNING if model == PAGED else 1 + WAITING
    asked = [{"ids": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in tiny.prompts((3, 5, 7, 9, 20, 30, 50, 60)[:count])]
    asked[1] |= {"temperature": 1.0, "seed": 5}
    alone = [pieces(running, model, **one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: pieces(running, model, **one), asked))
    assert [tokens(one) for one in together] == [tokens(one) for one in alone]
    assert [text(one) for one in together] == [text(one) for one in alone]


@pytest.mark.parametrize("model", KINDS)
def test_a_seed_gives_the_same_answer_again(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    ask = {"ids": prompt, "max_tokens": 30, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    one, again, other = (tokens(pieces(running, model, **ask, seed=seed)) for seed in (3, 3, 4))
    assert one == again
    assert one != other


@pytest.mark.parametrize("model", KINDS)
def test_what_ends_an_answer(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    whole = tiny.greedy(KINDS[model], prompt, 40)
    letters = tiny.tokenizer().decode(whole, skip_special_tokens=True)
    ended = pieces(running, model, ids=prompt, max_tokens=40, ignore_eos=True, stop_tokens=[whole[4]])
    assert tokens(ended) == whole[: whole.index(whole[4]) + 1]
    assert ended[-1].finish_reason == "stop"
    stop = letters[5:8]
    ended = pieces(running, model, ids=prompt, max_tokens=40, ignore_eos=True, stop=[stop, "never there"])
    assert text(ended) == letters[: letters.index(stop)]
    assert ended[-1].finish_reason == "stop"
    assert pieces(running, model, ids=prompt, timeout_seconds=0.001, **LONG)[-1].finish_reason == "timeout"
    assert sum(piece.completion_tokens or 0 for piece in pieces(running, model, ids=prompt)) <= 128


def test_a_whole_answer_is_one_response(running: Service) -> None:
    prompt = tiny.prompts((9,))[0]
    [whole] = pieces(running, PAGED, ids=prompt, max_tokens=20, ignore_eos=True, stream=False)
    assert whole.tokens == tiny.greedy("llama", prompt, 20)
    assert whole.completion_tokens == 20


def test_a_search_gives_its_best_answers(running: Service) -> None:
    prompt = tiny.prompts((9,))[0]
    best = pieces(running, PAGED, ids=prompt, max_tokens=6, ignore_eos=True, stream=False, beams=4, answers=2)
    assert [piece.index for piece in best] == [0, 1]
    assert best[0].tokens != best[1].tokens
    assert all(len(piece.tokens) == 6 for piece in best)


@pytest.mark.parametrize("model", KINDS)
def test_chat_and_text(running: Service, model: str) -> None:
    def ids(prompt: str) -> list[int]:
        return tiny.tokenizer()(prompt)["input_ids"]

    ask = {"max_tokens": 10, "ignore_eos": True}
    plain = tokens(pieces(running, model, text="user:hi a:", **ask))
    assert plain == tiny.greedy(KINDS[model], np.array(ids("user:hi a:"), np.int32), 10)
    assert tokens(pieces(running, model, text="hi", chat=True, **ask)) == plain
    assert tokens(pieces(running, model, messages=[{"role": "user", "content": "hi"}], **ask)) == plain
    assert tokens(pieces(running, model, text="hi", **ask)) != plain


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "no prompt given; give one of TEXT, MESSAGES and INPUT_IDS"),
    "two": ({"text": "a", "ids": [5]}, "TEXT and INPUT_IDS given"),
    "empty": ({"text": ""}, "has no token"),
    "no ids": ({"ids": []}, "0 ids given"),
    "unknown id": ({"ids": [5, 160]}, "160 given; 0 to 159 is allowed"),
    "negative id": ({"ids": [-1]}, "-1 given"),
    "too long": ({"ids": [5] * 257}, "257 ids given; 1 to 256 are allowed"),
    "no room": ({"ids": [5] * 256}, "the prompt has 256 tokens; 255 are allowed"),
    "context": ({"ids": [5] * 200, "max_tokens": 57}, "MAX_TOKENS up to 56 is allowed"),
    "long text": ({"text": "a" * 10_000}, "10000 bytes given; at most 8192"),
    "tokens": ({"text": "a", "max_tokens": 0}, "MAX_TOKENS: 0 given"),
    "temperature": ({"text": "a", "temperature": float("nan")}, "TEMPERATURE: nan given"),
    "top p": ({"text": "a", "temperature": 1, "top_p": 0}, "TOP_P: 0 given"),
    "idle": ({"text": "a", "top_k": 3}, "TOP_K given without TEMPERATURE"),
    "stop": ({"text": "a", "stop": [""]}, "STOP: at most 16 texts of 1 to 256 letters"),
    "beams": ({"text": "a", "beams": 2}, "STREAM false"),
    "answers": ({"text": "a", "answers": 2}, "give at least as many BEAMS"),
    "chat ids": ({"ids": [5], "chat": True}, "take no chat template"),
    "messages": ({"messages": [{"role": "user"}]}, "message 0 is none"),
    "time": ({"text": "a", "timeout_seconds": -1.0}, "TIMEOUT_SECONDS: -1 given"),
}


@pytest.mark.parametrize("model", KINDS)
def test_wrong_requests_are_refused_and_disturb_nobody(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: tokens(pieces(running, model, ids=prompt, **LONG)))
        for asked, line in REFUSED.values():
            for _ in range(4):
                with pytest.raises(RequestError) as caught:
                    pieces(running, model, **asked)
                assert line in str(caught.value) or "beams" in asked, str(caught.value)
        assert beside.result() == tiny.greedy(KINDS[model], prompt, 230)


def test_what_triton_itself_refuses_disturbs_nobody(running: Service) -> None:
    ids = InferInput("INPUT_IDS", [2], "FP32")
    ids.set_data_from_numpy(np.zeros(2, np.float32))
    found: queue.Queue[Any] = queue.Queue()
    with InferenceServerClient(running.grpc_address) as client:
        client.start_stream(lambda result, error: found.put(error))
        for wrong in (PAGED, "no-such-model"):
            client.async_stream_infer(wrong, [ids])
            assert found.get(timeout=20) is not None
        with pytest.raises(Exception, match="decoupled"):
            client.infer(PAGED, inputs({"TEXT": "a"}))
        client.stop_stream()
    assert len(tokens(pieces(running, PAGED, ids=[5], max_tokens=5, ignore_eos=True))) == 5


def full(running: Service, model: str) -> tuple[Any, list[LanguageClient], list[Any]]:
    """Fills the places and the queue of a model with answers that are not read to their end."""
    count = (RUNNING if model == PAGED else 1) + WAITING
    clients = [LanguageClient(running.grpc_address, model, seconds=60) for _ in range(count)]
    return count, clients, [client.stream(ids=[5, 6, 7], **LONG) for client in clients]


def slowed(model: Any) -> None:
    """Nothing: tiny models are quick, so tests below count on many tokens and read none."""


@pytest.mark.parametrize("model", KINDS)
def test_a_cancelled_answer_makes_room_within_a_second(running: Service, model: str) -> None:
    """An answer of a stopped model process stands still; once it goes on, it must be gone though most of it is not generated."""
    with LanguageClient(running.grpc_address, model) as client:
        answer = client.stream(ids=[5, 6, 7], **LONG)
        next(answer)
        answer.close()
    before = time.monotonic()
    assert pieces(running, model, ids=[5], max_tokens=1)[-1].finish_reason
    assert time.monotonic() - before < 60  # that it ends at all; the time itself is looked at in test_engine


def stub(running: Service, model: str) -> psutil.Process:
    """The process of a model."""
    assert running._triton is not None
    assert running._triton._process is not None
    below = psutil.Process(running._triton._process.pid).children(recursive=True)
    return next(one for one in below if "backend_stub" in one.name() and any(f"/{model}/" in word for word in one.cmdline()))


@contextlib.contextmanager
def standing_still(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_a_client_that_does_not_read_disturbs_nobody(running: Service) -> None:
    """It fills the window of its own stream: 200 requests whose responses nobody takes."""
    prompt = tiny.prompts((9,))[0]
    channel = grpc.insecure_channel(running.grpc_address)
    call = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    asked = pb.ModelInferRequest(model_name=PAGED, id="mine")
    for one in inputs({"INPUT_IDS": [5, 6], "MAX_TOKENS": 250, "IGNORE_EOS": True}):
        asked.inputs.append(one._get_tensor())
        asked.raw_input_contents.append(one._get_content())
    leave = threading.Event()

    def requests() -> Iterator[Any]:
        for _ in range(200):
            yield asked
            time.sleep(0.005)
        leave.wait(120)

    responses = call(requests())
    try:
        for _ in range(3):
            deadline = time.monotonic() + 60
            while True:  # the queue is full of what the other asked, until it is answered
                try:
                    found = tokens(pieces(running, PAGED, ids=prompt, max_tokens=40, ignore_eos=True))
                    break
                except RequestError as error:
                    assert "try again later" in str(error)
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            assert found == tiny.greedy("llama", prompt, 40)
        first = next(responses)
        assert first.infer_response.id == "mine" or "try again later" in first.error_message
    finally:
        leave.set()
        responses.cancel()
        channel.close()


@pytest.mark.parametrize("model", KINDS)
def test_a_full_queue_refuses(running: Service, model: str) -> None:
    count = 3 * (RUNNING + WAITING)

    def ask(_: int) -> str:
        try:
            return str(pieces(running, model, ids=[5, 6, 7], **LONG)[-1].finish_reason)
        except RequestError as error:
            return str(error)

    with standing_still(stub(running, model)), ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, number) for number in range(count)]
        time.sleep(2)  # all have arrived
        stub(running, model).resume()
        told = [one.result() for one in asked]
    refused = [line for line in told if "the most allowed; try again later" in line]
    assert len(refused) + told.count("length") == count
    assert refused
    assert told.count("length") >= 1 + WAITING
    assert pieces(running, model, ids=[5], max_tokens=1)


def post(running: Service, path: str, document: Any) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(running.http_address, timeout=60)
    connection.request("POST", path, json.dumps(document) if not isinstance(document, bytes) else document)
    answer = connection.getresponse()
    return answer.status, answer.getheader("Content-Type", ""), answer


def events(answer: http.client.HTTPResponse) -> list[dict[str, Any]]:
    parts = answer.read().decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("model", KINDS)
def test_server_sent_events(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    document = {"id": "mine", "INPUT_IDS": prompt.tolist(), "MAX_TOKENS": 20, "parameters": {"IGNORE_EOS": True}}
    status, kind, answer = post(running, f"/v2/models/{model}/generate_stream", document)
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    found = events(answer)
    assert [token for event in found for token in event["TOKENS"]] == tiny.greedy(KINDS[model], prompt, 20)
    assert found[-1]["FINISH_REASON"] == "length"
    assert all(event["id"] == "mine" for event in found)
    status, kind, answer = post(running, f"/v2/models/{model}/generate", document)
    whole = json.loads(answer.read())
    assert (status, kind) == (200, "application/json; charset=utf-8")
    assert whole["TOKENS"] == tiny.greedy(KINDS[model], prompt, 20)
    assert whole["TEXT"] == "".join(event["TEXT"] for event in found)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"TEXT": "a", "TOP_K": 3}, "TOP_K given without TEMPERATURE"),
        ({"TEXT": "a", "TOPK": 3}, "'TOPK': the model has no such input"),
        ({"TEXT": 3}, "BYTES are strings"),
        ({"TEXT": ["a", "b"]}, "TEXT"),
        ({"TEXT": {"a": 1}}, "BYTES are strings"),
        ({"TEXT": "a", "MAX_TOKENS": 1.5}, "not of the datatype INT32"),
        ({"TEXT": "a", "parameters": [1]}, "an object is expected"),
        ({"TEXT": "a", "parameters": {"TEXT": "b"}}, "given twice"),
        (b"[" * 5000, "nested too deep"),
        (b"no json", "not JSON"),
    ],
)
def test_wrong_bodies(running: Service, verb: str, document: Any, line: str) -> None:
    status, _, answer = post(running, f"/v2/models/{PAGED}/{verb}", document)
    assert (status, line in json.loads(answer.read())["error"]) == (400, True)


def test_a_body_for_no_model(running: Service) -> None:
    status, _, answer = post(running, "/v2/models/none/generate", {"TEXT": "a"})
    assert status in (400, 404)
    assert "none" in json.loads(answer.read())["error"]


def test_a_reader_of_events_that_leaves_is_noticed(running: Service) -> None:
    """Both leave: one before its first event, one after it. The queue is empty again soon."""
    process = stub(running, STATEFUL)
    with standing_still(process):
        connections = []
        for _ in range(1 + WAITING):
            connection = http.client.HTTPConnection(running.http_address, timeout=60)
            connection.request("POST", f"/v2/models/{STATEFUL}/generate_stream", json.dumps({"INPUT_IDS": [5], "MAX_TOKENS": 250}))
            connections.append(connection)
        time.sleep(1)
        for connection in connections:
            connection.close()
        time.sleep(1)
    prompt = tiny.prompts((9,))[0]
    assert tokens(pieces(running, STATEFUL, ids=prompt, max_tokens=10, ignore_eos=True)) == tiny.greedy("mistral", prompt, 10)
