"""Which requests the front takes, on a clock of the test's own."""

import asyncio
import heapq
import json
import random
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from triton_repo.config import ModelSettings, Scheduling, from_text, model_config, to_text
from triton_repo.front.admission import Admission, Flow, Request, refusal
from triton_repo.front.figures import figures
from triton_repo.front.inference import Inference, queue_request
from triton_repo.front.limits import Rejected
from triton_repo.front.routes import Route, Routes
from triton_repo.queueing import MOST_TIMEOUT_MS, Queue, read_policy

ROUTE = Route("1", timeout_ms=100)
ASKED = Request(timeout_s=0.1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def overload(service_s: float, load: float, seconds: float, seed: int, stall_at: float = -1.0):
    """A server with one worker behind the admission; returns what became of each request: (arrived, outcome, latency)."""
    clock, generator = Clock(), random.Random(seed)
    admission, waiting, done, events, free = Admission(clock), [], [], [], True
    arrival, number = 0.0, 0
    while arrival < seconds:
        heapq.heappush(events, (arrival, number, "arrives"))
        arrival, number = arrival + generator.expovariate(load / service_s), number + 1
    answering = None
    while events:
        clock.now, _, kind = heapq.heappop(events)
        if kind == "arrives":
            place = admission.enter("m", ASKED, ROUTE)
            try:
                place.__enter__()
            except Rejected:
                done.append((clock.now, "refused", 0.0))
            else:
                waiting.append((clock.now, place))
        else:
            arrived, place = answering
            place.__exit__(None, None, None)
            done.append((arrived, "answered", clock.now - arrived))
            free = True
        if free and waiting:
            answering, free = waiting.pop(0), False
            took = 1.0 if 0 <= stall_at <= clock.now < stall_at + 2 * service_s else service_s
            number += 1
            heapq.heappush(events, (clock.now + took, number, "answers"))
    return done


@pytest.mark.whole
@settings(max_examples=12)
@given(st.floats(0.001, 0.01), st.floats(1.5, 6.0), st.integers(0, 2**20))
@example(0.009765625, 5.0, 16486)  # more arrive before the first answer than could be answered in time
def test_what_is_taken_under_overload_is_answered_in_time_and_the_server_stays_busy(service_s, load, seed):
    done = overload(service_s, load, 3.0, seed)
    answered = [latency for _, outcome, latency in done if outcome == "answered"]
    assert max(answered) <= ASKED.timeout_s
    assert len(answered) >= 0.9 * 3.0 / service_s
    assert len(answered) < len(done)


def test_nothing_is_refused_at_half_the_load():
    assert all(outcome == "answered" for _, outcome, _ in overload(0.002, 0.5, 5.0, 0))


def test_a_standstill_is_forgotten():
    """After a second without an answer, the requests of the next seconds are taken again as before."""
    done = overload(0.002, 0.5, 10.0, 1, stall_at=2.0)
    late = [outcome for arrived, outcome, _ in done if arrived > 5.0]
    assert late
    assert set(late) == {"answered"}
    assert any(outcome == "refused" for arrived, outcome, _ in done if 2.0 < arrived < 4.0)


def test_the_service_time_is_that_of_the_answers():
    clock = Clock()
    admission = Admission(clock)
    for _ in range(500):
        with admission.enter("m", Request(rows=4), ROUTE):
            clock.now += 0.02
        clock.now += 1.0  # a pause is no service
    assert admission.flows["m"].service_s == pytest.approx(0.005)


def test_higher_priorities_do_not_wait_for_lower_ones():
    flow = Flow(service_s=0.01)
    flow.rows[2] += 20
    flow.requests = 20
    assert "about 210 ms, longer than the 100 ms" in str(refusal(flow, Request(1, 2, 0.1), ROUTE))
    assert refusal(flow, Request(1, 1, 0.1), ROUTE) is None
    flow.rows[1] += 20
    assert refusal(flow, Request(1, 1, 0.1), ROUTE) is not None


def test_an_idle_model_takes_a_request_whatever_the_estimate_says():
    assert refusal(Flow(service_s=60.0), Request(8, 1, 0.1), ROUTE) is None


def test_requests_are_counted_and_limited():
    admission, route = Admission(Clock()), Route("1", max_requests=2)
    with admission.enter("m", Request(), route), admission.enter("m", Request(), route):
        with pytest.raises(Rejected, match=r"model m: 2 requests .* the most allowed; try again later") as caught:
            admission.enter("m", Request(), route).__enter__()
        assert caught.value.status == 503
        assert admission.flows["m"].requests == 2
    for error in (Rejected("x", 503), Rejected("x", 504), Rejected("x", 400), ValueError(), asyncio.CancelledError()):
        with pytest.raises(type(error)), admission.enter("m", Request(), route):
            raise error
    ended = {"answered": 2, "refused": 2, "timed_out": 1, "failed": 2, "cancelled": 1}
    assert (admission.flows["m"].ended, admission.flows["m"].requests) == (ended, 0)


def test_names_that_a_client_made_up_are_not_kept():
    admission = Admission(Clock())
    for number in range(10):
        with admission.enter(f"made-up-{number}", Request(), Route()):
            pass
    assert admission.flows == {}


def request(**parameters: int) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="m")
    made.inputs.add(name="TEXT", datatype="BYTES", shape=[3, 1])
    for name, value in parameters.items():
        made.parameters[name].int64_param = value
    return made


def test_a_request_asks_for_its_level_and_for_less_time():
    route = Route("1", timeout_ms=100, priorities=3)
    assert queue_request(request(), route) == Request(3, 3, 0.1)
    assert queue_request(request(priority=1, timeout=20_000), route) == Request(3, 1, 0.02)
    assert queue_request(request(timeout=900_000), route).timeout_s == 0.1
    assert queue_request(request(), route, 0.05).timeout_s == 0.05
    assert queue_request(request(), Route("1")) == Request(3, 1, None)
    with pytest.raises(Rejected, match="priority 4 given; model m has 3"):
        queue_request(request(priority=4), route)


@pytest.mark.parametrize(
    ("code", "took", "told"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, 0.02, "model m: no answer within 20 ms; try again later"),
        (grpc.StatusCode.CANCELLED, 0.02, "model m: no answer within 20 ms; try again later"),
        (grpc.StatusCode.CANCELLED, 0.01, None),
        (grpc.StatusCode.INTERNAL, 0.03, None),
    ],
)
def test_a_request_is_too_late_whoever_sees_it_first(code, took, told, tmp_path, monkeypatch):
    """Triton may see that the time is over before the front does, and calls that cancelled."""
    clock, admission = Clock(), Admission(Clock())
    monkeypatch.setattr("triton_repo.front.inference.time", SimpleNamespace(monotonic=clock))

    async def call(request, timeout):
        assert timeout == 0.02
        clock.now += took
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="CANCELLED")

    (tmp_path / "routes").write_text(json.dumps({"m": {"version": "1"}}))
    infer = Inference(SimpleNamespace(unary_unary=lambda *_: call), Routes(str(tmp_path / "routes")), admission)
    with pytest.raises(grpc.aio.AioRpcError if told is None else Rejected, match=told):
        asyncio.run(infer(request(timeout=20_000)))
    assert admission.flows["m"].ended == {"failed" if told is None else "timed_out": 1}


def test_routes_are_read_again_when_they_change(tmp_path):
    assert Routes().of("m") == Route()
    (tmp_path / "routes").write_text(json.dumps({"m": {"version": "1", "max_requests": 4}}))
    routes = Routes(str(tmp_path / "routes"))
    assert (routes.of("m"), routes.of("other")) == (Route("1", 4), Route())
    (tmp_path / "new").write_text(json.dumps({"m": {"version": "2"}}))
    (tmp_path / "new").replace(tmp_path / "routes")
    assert routes.of("m") == Route("2")


def test_metrics_name_each_model_and_outcome(tmp_path):
    (tmp_path / "routes").write_text(json.dumps({"m": {"version": "7"}}))
    clock = Clock()
    admission = Admission(clock)
    with admission.enter("m", Request(), Route("7")):
        clock.now = 0.25
    lines = figures(admission, Routes(str(tmp_path / "routes"))).splitlines()
    assert 'compress_front_requests_total{model="m",outcome="answered"} 1' in lines
    assert 'compress_front_service_seconds{model="m"} 0.250000000' in lines
    assert 'compress_front_version{model="m"} 7' in lines
    assert len([line for line in lines if line.startswith("# TYPE")]) == 4


def test_tokens_of_a_prompt_are_no_rows():
    assert queue_request(request(), Route("1", request_seconds=600.0)).rows == 1


@pytest.mark.parametrize("queue", [Queue(), Queue(max_requests=5), Queue(timeout_ms=1.5)])
def test_a_queue_has_a_time_out_without_which_triton_ignores_those_of_requests(queue):
    policy = model_config(
        ModelSettings("m", "text", False, 2, "openvino", 8, (1,), "static", {}, (), Scheduling(queue=queue))
    ).dynamic_batching.default_queue_policy
    assert policy.default_timeout_microseconds > 0
    assert policy.allow_timeout_override
    assert policy.timeout_action == policy.REJECT


@pytest.mark.parametrize(
    "queue", [Queue(), Queue(timeout_ms=MOST_TIMEOUT_MS), Queue(max_requests=5), Queue(timeout_ms=1.5, priorities=3), Queue(priorities=2)]
)
def test_limits_stand_in_the_configuration(queue):
    config = model_config(ModelSettings("m", "text", False, 2, "openvino", 8, (1,), "static", {}, (), Scheduling(queue=queue)))
    assert read_policy(from_text(to_text(config))) == queue
    assert config.dynamic_batching.default_priority_level == (queue.priorities if queue.priorities > 1 else 0)
