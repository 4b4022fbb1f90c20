"""Traces of requests: the process of the front before a stand-in for Triton, and a collector of OpenTelemetry."""

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from foundation.core import otlp
from foundation.core.errors import InputError
from foundation.machine.process import environment
from tests.collector import Collector, Received, collecting
from triton_repo.front.settings import KEYS, Settings
from triton_repo.safe_folder import safe_folder
from triton_repo.server import trace_options
from triton_repo.serving import traces_here

ROOT = Path(__file__).parents[2]
KEY = {"authorization": "Bearer 0123456789abcdef"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
INFER, INDEX = "/v2/models/m/infer", "/v2/repository/index"
SERVER, CLIENT = 2, 3
BODY = json.dumps({"inputs": [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["a fine film"]}]}).encode()


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """In the place of Triton: notes the metadata of each call."""

    def __init__(self) -> None:
        self.parents: list[str | None] = []

    def _note(self, context: grpc.ServicerContext) -> None:
        self.parents.append(dict(context.invocation_metadata()).get("traceparent"))

    def ModelInfer(self, request, context):
        self._note(context)
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.INTERNAL, "no room")
        return pb.ModelInferResponse(model_name=request.model_name, id=request.id)

    def ModelStreamInfer(self, requests, context):
        self._note(context)
        for request in requests:
            response = pb.ModelStreamInferResponse()
            response.infer_response.id = request.id
            response.infer_response.parameters["triton_final_response"].bool_param = True
            yield response

    def ServerLive(self, request, context):
        return pb.ServerLiveResponse(live=True)


@dataclass
class Front:
    """A front that traces."""

    settings: Settings
    triton: Triton
    collector: Collector
    process: subprocess.Popen
    seen: int = field(default=0)

    def post(self, path: str, **headers: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{self.settings.http_port}{path}", BODY, KEY | headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def spans(self, count: int) -> list[Received]:
        """Waits for that many new spans, and returns all new ones, the outer ones first."""
        until(lambda: len(self.collector.spans) >= self.seen + count)
        found = self.collector.spans[self.seen :]
        self.seen += len(found)
        return sorted(found, key=lambda span: (span.start_ns, span.kind))


def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("nothing came within 20 s")


def message(model: str = "m") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype="INT64", shape=[1]).contents.int64_contents.append(1)
    return request


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    folder, triton = safe_folder(), Triton()
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    server.add_insecure_port(f"unix:{folder / 'grpc'}")
    server.start()
    with collecting() as collector:
        places = (f"unix:{folder / 'grpc'}", str(folder / "metrics"))
        asked = Settings("127.0.0.1", 0, 0, 0, *places, ("m",), traces=f"{collector.url}/v1/traces")
        command = [sys.executable, "-m", "triton_repo.front.process", json.dumps(asdict(asked))]
        variables = {KEYS: KEY["authorization"].split()[1], "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SERVICE_NAME": "front-of-tests"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(**variables), cwd=ROOT)
        try:
            assert process.stdout is not None
            yield Front(Settings(**json.loads(process.stdout.readline())), triton, collector, process)
        finally:
            process.kill()
            process.wait()
            server.stop(0)
            shutil.rmtree(folder)


pytestmark = pytest.mark.whole


def check_chain(front: Front, spans: list[Received], name: str, method: str) -> None:
    """Checks that the spans are a request and its call of Triton, and that Triton has the context of the latter."""
    outer, inner = spans
    assert (outer.service, outer.name, outer.kind, inner.name, inner.kind) == ("front-of-tests", name, SERVER, f"triton {method}", CLIENT)
    assert (outer.trace, outer.parent) == (TRACE, SPAN), "the span of the client"
    assert (inner.trace, inner.parent) == (TRACE, outer.id)
    check_sent(front.triton.parents[-1], inner)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def check_sent(parent: str | None, span: Received) -> None:
    """Checks a `traceparent`: of this span, and sampled; the flag 2 of level 2 says that the id of a trace was drawn."""
    assert parent is not None
    version, trace, found, flags = parent.split("-")
    assert (version, trace, found, int(flags, 16) & 1) == ("00", span.trace, span.id, 1)


def test_the_trace_of_a_client_arrives_at_triton_by_http(front):
    assert front.post(INFER, traceparent=PARENT) == 200
    spans = front.spans(2)
    check_chain(front, spans, "POST /v2/models/{model}/infer", "ModelInfer")
    assert spans[0].attributes["http.response.status_code"] == 200
    assert spans[1].attributes["compress.model"] == "m"


def test_and_by_grpc_whole_and_in_a_stream(front):
    metadata = (("traceparent", PARENT), *KEY.items())
    with grpc.insecure_channel(f"127.0.0.1:{front.settings.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(message(), metadata=metadata)
        check_chain(front, front.spans(2), "inference.GRPCInferenceService/ModelInfer", "ModelInfer")
        assert [one.error_message for one in stub.ModelStreamInfer(iter([message()]), metadata=metadata)] == [""]
        check_chain(front, front.spans(2), "inference.GRPCInferenceService/ModelStreamInfer", "ModelStreamInfer")
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(message("broken"), metadata=metadata)
        outer, inner = front.spans(2)
        assert (outer.failed, outer.attributes["rpc.grpc.status_code"]) == (True, 13)
        assert (inner.failed, inner.attributes["rpc.grpc.status_code"]) == (True, 13)


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        "nonsense",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-0" + "1" * 4000,
    ],
)
def test_a_context_that_is_missing_or_malformed_begins_a_new_trace(front, parent):
    assert front.post(INFER, **({} if parent is None else {"traceparent": parent})) == 200
    outer, inner = front.spans(2)
    assert (outer.parent, inner.trace, inner.parent) == ("", outer.trace, outer.id)
    assert outer.trace != TRACE
    check_sent(front.triton.parents[-1], inner)


def test_what_a_client_does_not_sample_has_no_spans_and_neither_has_what_asks_no_model(front):
    assert front.post(INFER, traceparent=f"00-{TRACE}-{SPAN}-00") == 200
    assert front.triton.parents[-1] is None, "Triton would make spans of it"
    with urllib.request.urlopen(f"http://127.0.0.1:{front.settings.http_port}/v2/health/live", timeout=30) as answer:
        assert answer.status == 200
    assert front.post(INFER, authorization="Bearer no", traceparent=PARENT) == 401
    assert front.post(INDEX, traceparent=PARENT) == 500, "the stand-in lists no models"
    assert front.post(INFER, traceparent=PARENT) == 200
    check_chain(front, front.spans(2), "POST /v2/models/{model}/infer", "ModelInfer")


def test_spans_say_how_a_request_failed_without_its_words(front):
    assert front.post("/v2/models/m/secret-path", traceparent=PARENT) == 404
    assert front.post("/v2/models/broken/infer", traceparent=PARENT) == 500
    unknown, outer, _ = front.spans(3)
    assert (unknown.name, unknown.failed, unknown.attributes["http.response.status_code"]) == ("POST", False, 404)
    assert (outer.failed, outer.attributes["http.response.status_code"]) == (True, 500)
    assert "secret-path" not in repr(front.collector.spans)
    assert "no room" not in repr(front.collector.spans)


def test_a_collector_that_never_answers_holds_up_no_request(front):
    front.collector.open.clear()
    try:
        while front.collector.came.acquire(blocking=False):
            pass
        assert front.post(INFER, traceparent=PARENT) == 200
        assert front.collector.came.acquire(timeout=20)
        assert [front.post(INFER, traceparent=PARENT) for _ in range(20)] == [200] * 20, "while the collector holds a request"
    finally:
        front.collector.open.set()
    assert len(front.spans(42)) == 42
    front.collector.status = 500
    assert [front.post(INFER, traceparent=PARENT) for _ in range(3)] == [200] * 3


def test_the_last_spans_are_sent_when_the_front_ends(front):
    front.collector.status = 200
    until(lambda: front.post(INFER, traceparent=PARENT) == 200)
    front.process.terminate()
    front.process.wait(20)
    spans = front.collector.spans[front.seen :]
    assert front.triton.parents[-1].split("-")[2] in {span.id for span in spans}


def test_without_traces_nothing_of_opentelemetry_is_imported():
    code = "import sys, triton_repo.front.process, triton_repo.serving; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


BASE, EXACT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({BASE: "http://a:4318"}, "http://a:4318/v1/traces"),
        ({BASE: "http://a:4318/base/"}, "http://a:4318/base/v1/traces"),
        ({BASE: "http://a:4318", EXACT: "https://b/t"}, "https://b/t"),
        ({BASE: "http://a:4318", PROTOCOL: "http/protobuf"}, "http://a:4318/v1/traces"),
        ({BASE: "http://a:4318", "OTEL_SDK_DISABLED": "true"}, ""),
        ({BASE: "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({BASE: "http://a:4318", PROTOCOL: "grpc"}, "4318"),
        ({BASE: "http://me:hunter2@a:4318"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({BASE: "a:4318"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_the_collector_is_what_standard_variables_say(variables, expected, monkeypatch):
    for name in (BASE, EXACT, PROTOCOL, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    if not expected or expected.startswith("http"):
        assert traces_here(said.append) == expected
        assert [expected in line for line in said] == ([True] if expected else [])
        assert (f"--trace-config=opentelemetry,url={expected}" in trace_options(expected)) == bool(expected)
        return
    with pytest.raises(InputError) as caught:
        traces_here(said.append)
    assert expected in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_machine_with_the_variables_and_without_the_packages_serves_and_says_so(monkeypatch):
    monkeypatch.setenv(BASE, "http://a:4318")
    monkeypatch.setattr(otlp, "PACKAGES", ("no-such-package",))
    said: list[str] = []
    assert traces_here(said.append) == ""
    assert "no-such-package" in said[0]
