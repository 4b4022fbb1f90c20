"""Wrong requests, full queues and clients that leave or do not read: refused, and nobody else notices. Needs the server environment."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc import service_pb2 as pb

from tests.triton_repo.generation import tiny_language as tiny
from tests.triton_repo.generation.served_language import (
    CROWD,
    CROWDED,
    KINDS,
    LONG,
    PAGED,
    RUNNING,
    STATEFUL,
    WAITING,
    pieces,
    post,
    tokens,
)
from triton_repo.client import RequestError
from triton_repo.generation.client import LanguageClient, inputs
from triton_repo.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"max_tokens": 3}, "no prompt given; give one of TEXT, MESSAGES and INPUT_IDS"),
    "two": ({"text": "a", "ids": [5]}, "TEXT and INPUT_IDS given"),
    "empty": ({"text": ""}, "has no token"),
    "no ids": ({"ids": []}, "0 ids given"),
    "unknown id": ({"ids": [5, 160]}, "160 given; 0 to 159 is allowed"),
    "negative id": ({"ids": [-1]}, "-1 given"),
    "too long": ({"ids": [5] * 30_001}, "30001 ids given; 1 to 30000 are allowed"),
    "no room": ({"ids": [5] * 30_000}, "the prompt has 30000 tokens; 29999 are allowed"),
    "context": ({"ids": [5] * 200, "max_tokens": 29_801}, "MAX_TOKENS up to 29800 is allowed"),
    "long text": ({"text": "a" * 1_000_000}, "1000000 bytes given; at most 960000"),
    "tokens": ({"text": "a", "max_tokens": 0}, "MAX_TOKENS: 0 given"),
    "temperature": ({"text": "a", "temperature": float("nan")}, "TEMPERATURE: nan given"),
    "top p": ({"text": "a", "temperature": 1, "top_p": 0}, "TOP_P: 0 given"),
    "idle": ({"text": "a", "top_k": 3}, "TOP_K given without TEMPERATURE"),
    "stop": ({"text": "a", "stop": [""]}, "STOP: at most 16 texts of 1 to 256 letters"),
    "beams": ({"text": "a", "beams": 65}, "BEAMS: 65 given; 1 to 64 is allowed"),
    "answers": ({"text": "a", "answers": 2}, "give at least as many BEAMS"),
    "chat ids": ({"ids": [5], "chat": True}, "take no chat template"),
    "messages": ({"messages": [{"role": "user"}]}, "message 0 is not like that"),
    "time": ({"text": "a", "timeout_seconds": -1.0}, "TIMEOUT_SECONDS: -1 given"),
}


@pytest.mark.parametrize("model", KINDS)
def test_wrong_requests_are_refused_and_disturb_nobody(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(pieces, running, model, ids=prompt, max_tokens=230, ignore_eos=True)
        for asked, line in REFUSED.values():
            for _ in range(4):
                with pytest.raises(RequestError) as caught:
                    pieces(running, model, **asked)
                assert line in str(caught.value)
        assert tokens(beside.result()) == tiny.greedy(KINDS[model], prompt, 230)


@pytest.mark.parametrize(("model", "line"), [(PAGED, "needs STREAM false"), (STATEFUL, "does not search")])
def test_a_search_is_not_streamed(running: Service, model: str, line: str) -> None:
    with pytest.raises(RequestError, match=line):
        pieces(running, model, text="a", beams=2)


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


class Begun:
    """Long answers that have begun, or wait; a context manager that leaves them."""

    def __init__(self, running: Service, model: str, count: int) -> None:
        self._clients = [LanguageClient(running.grpc_address, model, seconds=60) for _ in range(count)]
        self._answers = [client.stream(**LONG) for client in self._clients]
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> list[Any]:
        self._first = [self._pool.submit(next, answer) for answer in self._answers]
        return self._first

    def leave(self, number: int) -> None:
        """Cancels one of them."""
        self._clients[number]._client.stop_stream(cancel_requests=True)

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client._client.stop_stream(cancel_requests=True)
        self._pool.shutdown(wait=True)
        for client in self._clients:
            client.__exit__(None, None, None)


@pytest.mark.parametrize("model", KINDS)
def test_a_full_queue_refuses_and_whoever_leaves_makes_room(running: Service, model: str) -> None:
    room = (RUNNING if model == PAGED else 1) + WAITING
    with Begun(running, model, room) as first:
        until(lambda: sum(one.done() for one in first) >= room - WAITING and refuses(running, model))
        for _ in range(4):
            with pytest.raises(RequestError, match=f"{room - WAITING} requests .* {WAITING} wait, the most"):
                pieces(running, model, ids=[5], max_tokens=1)
        status, _, answer = post(running, f"/v2/models/{model}/generate", {"TEXT": "a"})
        assert status == 503
        assert "the most allowed; try again later" in json.loads(answer.read())["error"]
    until(lambda: at_once(running, model))


@pytest.mark.parametrize("model", KINDS)
def test_the_slot_of_a_cancelled_answer_is_free_within_a_second(running: Service, model: str) -> None:
    """The queue is full until the slot is free and one that waits has taken it: nobody is refused who asks a second later."""
    answers = Begun(running, model, RUNNING if model == PAGED else 1)
    with answers as first, ExitStack() as stack:
        until(lambda: all(one.done() for one in first))
        waiting: list[Any] = []

        def full() -> bool:
            if refuses(running, model):
                return True
            waiting.extend(stack.enter_context(Begun(running, model, 1)))  # one more than fits is refused, since a look may take a place
            return False

        until(full)
        assert not begun(waiting)
        answers.leave(0)
        left = refused = asked = time.monotonic()
        while refuses(running, model):
            refused, asked = asked, time.monotonic()
            assert refused < left + 20, "it did not happen"
            time.sleep(0.02)
        assert refused < left + 1
        until(lambda: begun(waiting) == 1)


def begun(answers: list[Any]) -> int:
    """How many of these answers have begun."""
    return sum(one.done() and one.exception() is None for one in answers)


def test_a_crowd_at_once_is_answered(running: Service) -> None:
    """The decoder takes as many requests at once as its queue was raised for."""
    prompts = tiny.prompts(tuple(range(1, 41)))
    expected = [tiny.greedy("llama", prompt, 12) for prompt in prompts]
    together = threading.Barrier(CROWD)

    def one(number: int) -> list[int]:
        with LanguageClient(running.grpc_address, CROWDED) as client:
            together.wait(60)
            return tokens(list(client.stream(ids=prompts[number % len(prompts)], max_tokens=12, ignore_eos=True)))

    with ThreadPoolExecutor(CROWD) as pool:
        found = list(pool.map(one, range(CROWD)))
    assert found == [expected[number % len(prompts)] for number in range(CROWD)]


def refuses(running: Service, model: str) -> bool:
    """Whether the queue of a model is full; a request that it takes gives up soon."""
    try:
        return not pieces(running, model, ids=[5], max_tokens=1, timeout_seconds=0.5)
    except RequestError as error:
        if "try again later" not in str(error):
            raise
        return True


def at_once(running: Service, model: str) -> bool:
    """Whether a model answers at once."""
    try:
        return pieces(running, model, ids=[5], max_tokens=1, timeout_seconds=0.5)[-1].finish_reason in ("length", "stop")
    except RequestError as error:
        if "try again later" not in str(error):
            raise
        return False


def until(there: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("model", KINDS)
def test_readers_of_events_that_leave_make_room(running: Service, model: str) -> None:
    readers: list[http.client.HTTPConnection] = []

    def full() -> bool:
        if refuses(running, model):
            return True
        readers.append(reader(running, model))  # one more: the request that looked may have taken the place of one, which was refused
        return False

    until(full)
    assert len(readers) >= (RUNNING if model == PAGED else 1) + WAITING
    for connection in readers:
        connection.close()
    until(lambda: at_once(running, model))


def reader(running: Service, model: str) -> http.client.HTTPConnection:
    """A client that asks for a long answer and does not read it."""
    connection = http.client.HTTPConnection(running.http_address, timeout=60)
    document = {"INPUT_IDS": LONG["ids"], "MAX_TOKENS": LONG["max_tokens"], "IGNORE_EOS": True}
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(document))
    return connection


def test_a_client_that_does_not_read_disturbs_nobody(running: Service) -> None:
    """It fills the window of its own stream: 200 requests whose responses nobody takes."""
    prompt = tiny.prompts((9,))[0]
    channel = grpc.insecure_channel(running.grpc_address)
    call = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    asked = request(PAGED, input_ids=[5, 6], max_tokens=250, ignore_eos=True, piece_seconds=0)  # a response for each token
    asked.id = "mine"
    sent, leave = threading.Event(), threading.Event()

    def requests() -> Iterator[Any]:
        for _ in range(200):
            yield asked
            time.sleep(0.005)
        sent.set()
        leave.wait(120)

    responses = call(requests())
    try:
        assert sent.wait(20)  # until then they take every place that becomes free
        for _ in range(3):
            until(lambda: at_once(running, PAGED))
            assert tokens(pieces(running, PAGED, ids=prompt, max_tokens=40, ignore_eos=True)) == tiny.greedy("llama", prompt, 40)
        first = next(responses)
        assert first.infer_response.id == "mine" or "try again later" in first.error_message
    finally:
        leave.set()
        responses.cancel()
        channel.close()


WRONG_BODIES: list[tuple[Any, str]] = [
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
]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(("document", "line"), WRONG_BODIES)
def test_wrong_bodies(running: Service, verb: str, document: Any, line: str) -> None:
    status, _, answer = post(running, f"/v2/models/{PAGED}/{verb}", document)
    assert (status, line in json.loads(answer.read())["error"]) == (400, True)


def request(model: str, **values: Any) -> Any:
    """A request as gRPC has it."""
    asked = pb.ModelInferRequest(model_name=model)
    for one in inputs({name.upper(): value for name, value in values.items()}):
        asked.inputs.append(one._get_tensor())
        asked.raw_input_contents.append(one._get_content())
    return asked


def malformed(model: str) -> dict[str, bytes]:
    """Requests that no client of ours would send over gRPC."""
    made = {"no message": b"\xff" * 9}
    changes: dict[str, Any] = {
        "a name that no input has": lambda asked: setattr(asked.inputs[0], "name", "TOPK"),
        "another datatype": lambda asked: setattr(asked.inputs[0], "datatype", "FP32"),
        "a datatype that does not exist": lambda asked: setattr(asked.inputs[0], "datatype", "INT65"),
        "fewer elements than the shape says": lambda asked: asked.inputs[0].shape.__setitem__(0, 3),
        "a negative shape": lambda asked: asked.inputs[0].shape.__setitem__(0, -2),
        "a huge shape": lambda asked: asked.inputs[0].shape.__setitem__(0, 2**60),
        "no contents": lambda asked: asked.raw_input_contents.pop(),
        "an input given twice": lambda asked: (asked.inputs.append(asked.inputs[0]), asked.raw_input_contents.append(b"\0" * 16)),
        "an output that does not exist": lambda asked: asked.outputs.add(name="LOGITS"),
    }
    for name, change in changes.items():
        asked = request(model, input_ids=[5, 6])
        change(asked)
        made[name] = asked.SerializeToString()
    return made


@pytest.mark.parametrize("model", KINDS)
def test_malformed_requests_disturb_no_stream(running: Service, model: str) -> None:
    leave, there, streamed = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]

    def stream() -> None:
        with LanguageClient(running.grpc_address, model, seconds=60) as client, closing(client.stream(**LONG)) as found:
            for piece in found:
                streamed.extend(piece.tokens)
                there.set()
                if leave.is_set():
                    return

    with ThreadPoolExecutor(1) as pool, grpc.insecure_channel(running.grpc_address) as channel:
        beside = pool.submit(stream)
        try:
            assert there.wait(60)
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, pb.ModelStreamInferResponse.FromString)
            for name, message in malformed(model).items():
                assert refused(call(iter([message]))), name
            for verb in ("generate", "generate_stream"):
                for document, line in WRONG_BODIES:
                    status, _, answer = post(running, f"/v2/models/{model}/{verb}", document)
                    assert (status, line in json.loads(answer.read())["error"]) == (400, True)
            assert not beside.done()
        finally:
            leave.set()
        beside.result()
    alone = pieces(running, model, **{**LONG, "max_tokens": len(streamed)})
    assert streamed == tokens(alone)


def refused(responses: Any) -> bool:
    """Whether the first response is an error, or the stream ends with one that is the fault of the request."""
    try:
        response = next(responses)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    return bool(response.error_message)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_triton_ends_the_stream_of_a_refused_body_in_order(running: Service, verb: str) -> None:
    """Asked to end it with a status, it logs an error of its own each time, and crashes once in some hundred times."""
    for _ in range(20):
        assert post(running, f"/v2/models/{PAGED}/{verb}", {"TEXT": "a", "TOP_K": 3})[0] == 400
    assert "HandleCancellation called even when the context was not cancelled" not in running._log.read_text()


def test_a_body_for_no_model(running: Service) -> None:
    status, _, answer = post(running, "/v2/models/none/generate", {"TEXT": "a"})
    assert status in (400, 404)
    assert "none" in json.loads(answer.read())["error"]
