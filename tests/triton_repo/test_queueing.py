"""Limits, time-outs and priorities in the real server: python -m pytest -m slow tests/triton_repo/test_queueing.py"""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.test_docker_cpu import OURS, TRITON
from tests.triton_repo import tiny_exports as tiny
from triton_repo import client, environment, layout, server, service
from triton_repo.config import Scheduling
from triton_repo.live import without_limits
from triton_repo.queueing import Queue

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "text-fp32"
SECONDS = 0.1
"""What each request takes: the engine of the test sleeps."""
SLOW_ENGINE = f"""
import time
from slow import Engine as Real

class Engine(Real):
    def predict(self, features):
        time.sleep({SECONDS})
        with open(COUNTED, "a") as counted:
            counted.write("x")
        return super().predict(features)
"""
LIMITS = Queue(max_requests=4, timeout_ms=2000, priorities=2)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("queue"), LIMITS)


def written(root: Path, queue: Queue) -> Path:
    exported = tiny.export(root / "export", tiny.text_preprocessor(), tiny.TEXTS, (("text", "fp32"),))
    models = layout.served_models(exported)
    scheduling = Scheduling(queue=queue)
    layout.write_repository(root / "repository", models, pairs=False, batch_sizes=(1,), max_batch_size=1, scheduling=scheduling)
    engine = root / "repository" / MODEL / "1" / "engine.py"
    engine.rename(engine.with_name("slow.py"))
    engine.write_text(f"COUNTED = {str(root / 'counted')!r}\n{SLOW_ENGINE}")
    return root / "repository"


@pytest.fixture(scope="module")
def running(repository, tmp_path_factory):
    with service.Service(repository, environment.check(), tmp_path_factory.mktemp("log") / "log") as started:
        yield started


def asked(address: str, **parameters: int) -> tuple[str, float]:
    """Sends a request; returns its outcome, and when it ended."""
    with InferenceServerClient(address) as asking:
        try:
            asking.infer(MODEL, client.tensors(["dull"], InferInput), **parameters)
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}", time.monotonic()
        return "answered", time.monotonic()


def together(address: str, each: list[dict[str, int]], gap: float = 0.01) -> list[tuple[str, float]]:
    """Sends requests one shortly after the other; returns their outcomes in this order."""
    with ThreadPoolExecutor(len(each)) as pool:
        futures = []
        for parameters in each:
            futures.append(pool.submit(asked, address, **parameters))
            time.sleep(gap)
        return [one.result() for one in futures]


def test_more_requests_than_may_wait_are_refused(running):
    outcomes = [outcome for outcome, _ in together(running.grpc_address, [{}] * 12, gap=0.001)]
    refused = [outcome for outcome in outcomes if outcome != "answered"]
    assert outcomes.count("answered") >= LIMITS.max_requests
    assert len(refused) >= 4
    assert {one.partition(":")[0] for one in refused} == {"StatusCode.RESOURCE_EXHAUSTED"}
    assert all("4 requests are under way, the most allowed; try again later" in one for one in refused)


def test_a_higher_priority_comes_first(running):
    """One request is being answered and two wait; then comes one of the first level, and is answered before them."""
    found = together(running.grpc_address, [{"priority": 2}, {"priority": 2}, {"priority": 2}, {"priority": 1}])
    assert [outcome for outcome, _ in found] == ["answered"] * 4
    ended = [moment for _, moment in found]
    assert ended[0] < ended[3] < ended[1] < ended[2]


def test_what_would_take_longer_than_its_time_is_refused(running):
    found = together(running.grpc_address, [{}, {}, {"timeout": 50_000}])
    assert [outcome for outcome, _ in found[:2]] == ["answered"] * 2
    assert "longer than the 50 ms that it may take" in found[2][0]


def test_a_request_past_its_time_is_not_computed(repository, tmp_path):
    """Two that wait behind one are given up by their clients; the next one does not wait for them."""
    with server.TritonServer(without_limits(repository, tmp_path / "unlimited"), environment.check(), tmp_path / "log") as alone:
        counted = repository.parent / "counted"
        asked(alone.grpc_address)
        before = counted.stat().st_size
        found = together(alone.grpc_address, [{}, {"client_timeout": 0.5 * SECONDS}, {"client_timeout": 0.5 * SECONDS}, {}])
        assert [outcome for outcome, _ in found] == ["answered", *["StatusCode.DEADLINE_EXCEEDED: Deadline Exceeded"] * 2, "answered"]
        assert counted.stat().st_size - before == 2


def test_http_says_the_same(running):
    def post(**parameters: int) -> tuple[int, str]:
        document = {
            "inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["dull"]}],
            "parameters": parameters,
        }
        request = urllib.request.Request(f"http://{running.http_address}/v2/models/{MODEL}/infer", json.dumps(document).encode())
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]

    assert post(priority=1)[0] == 200
    assert post(priority=3) == (400, "priority 3 given; model text-fp32 has 2, of which 1 is served first")
    assert post(timeout=0)[0] == 400
    assert post(timeout=20_000) == (504, "model text-fp32: no answer within 20 ms; try again later")
    assert post(sequence_id=1)[0] == 400


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_the_paths_that_generate_keep_the_limits(running, verb):
    def post(_: int) -> int:
        request = urllib.request.Request(f"http://{running.http_address}/v2/models/{MODEL}/{verb}", b'{"TEXT": "dull"}')
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(post, range(12)))
    assert set(found) == {200, 503}


def test_the_metrics_say_what_was_refused(running):
    asked(running.grpc_address, timeout=20_000)
    with urllib.request.urlopen(f"http://{running.metrics_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['compress_front_requests_total{model="text-fp32",outcome="timed_out"}']) >= 1
    assert float(values['compress_front_version{model="text-fp32"}']) == 1
    assert {key.partition("{")[0] for key in values} >= OURS | TRITON  # what the board in docker/cpu shows


def test_an_evaluation_is_not_refused(repository, tmp_path):
    """More at once than the queue takes, and none of it is refused where the limits are left out."""
    unlimited = without_limits(repository, tmp_path / "unlimited")
    with server.TritonServer(unlimited, environment.check(), tmp_path / "log") as alone:
        assert [outcome for outcome, _ in together(alone.grpc_address, [{}] * 12, gap=0.001)] == ["answered"] * 12


@pytest.mark.parametrize("queue", [Queue(), Queue(max_requests=50)])
def test_a_request_may_ask_for_less_time_where_the_queue_sets_none(queue, tmp_path):
    with server.TritonServer(written(tmp_path, queue), environment.check(), tmp_path / "log") as alone:
        found = together(alone.grpc_address, [{}, {}, {}, {"timeout": 50_000}])
    assert [outcome for outcome, _ in found[:3]] == ["answered"] * 3
    assert "Request timeout expired" in found[3][0]


def test_triton_alone_keeps_the_limits_too(repository, tmp_path):
    with server.TritonServer(repository, environment.check(), tmp_path / "log") as alone:
        outcomes = [outcome for outcome, _ in together(alone.grpc_address, [{}] * 12, gap=0.001)]
        assert any("Exceeds maximum queue size" in outcome for outcome in outcomes)
        found = together(alone.grpc_address, [{}, {}, {}, {"timeout": 50_000}])
        assert "Request timeout expired" in found[3][0]
