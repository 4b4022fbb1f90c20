"""Traces of requests to the real server: what its own exporter sends."""

import json
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.collector import Collector, Received, collecting
from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.test_front_traces import PARENT, SPAN, TRACE, until
from triton_repo import environment, layout
from triton_repo.entrance import Entrance
from triton_repo.service import Service

pytestmark = pytest.mark.slow

MODEL = "text-fp32"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traced")
    exported = tiny.export(root / "text", tiny.text_preprocessor(), tiny.TEXTS, (("text", "fp32"),))
    layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    return root / "repository"


def service(repository: Path, collector: Collector, grpc: str) -> Service:
    log = repository.parent / f"{grpc}.log"
    return Service(repository, environment.check(), log, entrance=Entrance(grpc=grpc), traces=f"{collector.url}/v1/traces")


@pytest.fixture(scope="module")
def running(repository: Path, collector: Collector) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret-key")
        with service(repository, collector, "front") as found:
            yield found


def ask(running: Service, parent: str) -> None:
    document = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [["a fine film"]]}]}
    url = f"http://{running.http_address}/v2/models/{MODEL}/infer"
    request = urllib.request.Request(url, json.dumps(document).encode(), {"traceparent": parent})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def message() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"a fine film")
    return request


def come(collector: Collector, count: int) -> dict[str, Received]:
    """Waits for that many spans, and returns them by name."""
    until(lambda: len(collector.spans) >= count)
    found = {span.name: span for span in collector.spans}
    collector.spans.clear()
    assert len(found) == count
    return found


def test_the_trace_of_a_client_ends_in_the_engine(running, collector):
    ask(running, PARENT)
    spans = come(collector, 5)
    chain = [spans[name] for name in ("POST /v2/models/{model}/infer", "triton ModelInfer", "InferRequest", MODEL, "compute")]
    assert {span.trace for span in chain} == {TRACE}
    assert [span.parent for span in chain] == [SPAN, *(span.id for span in chain[:-1])]
    assert [span.service for span in chain] == ["compress-front"] * 2 + ["compress-triton"] * 3
    assert all(outer.start_ns <= inner.start_ns for outer, inner in pairwise(chain)), "Triton's last span ends after its answer has come"
    assert chain[3].events == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert chain[4].events == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert {headers["authorization"] for headers in collector.headers} == {"Bearer secret-key"}, "of the front and of Triton"


def test_a_stream_is_traced_too(running, collector):
    received: list[pb.ModelStreamInferResponse] = []
    with grpc.insecure_channel(running.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        received += stub.ModelStreamInfer(iter([message()]), metadata=(("traceparent", PARENT),))
    assert [one.error_message for one in received] == [""]
    spans = come(collector, 5)
    assert {span.trace for span in spans.values()} == {TRACE}
    assert spans["InferRequest"].parent == spans["triton ModelStreamInfer"].id


def test_what_a_client_does_not_sample_is_not_traced_though_triton_would(running, collector):
    ask(running, UNSAMPLED)
    with grpc.insecure_channel(running._triton.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(message())
        stub.ModelInfer(message(), metadata=(("traceparent", UNSAMPLED),))
    assert come(collector, 3).keys() == {"InferRequest", MODEL, "compute"}, "of the last one alone"


def test_where_grpc_goes_to_triton_its_first_span_is_below_the_clients(repository, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with service(repository, collector, "triton") as direct:
        with grpc.insecure_channel(direct.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(message())
            for parent in (PARENT, UNSAMPLED):
                stub.ModelInfer(message(), metadata=(("traceparent", parent),))
                spans = come(collector, 3)
                assert spans.keys() == {"InferRequest", MODEL, "compute"}
                assert (spans["InferRequest"].trace, spans["InferRequest"].parent) == (TRACE, SPAN)
        ask(direct, PARENT)
        spans = come(collector, 5)
        assert spans["InferRequest"].parent == spans["triton ModelInfer"].id, "HTTP passes the front as ever"
