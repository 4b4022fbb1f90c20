"""What the front lets through, and its process before a stand-in for Triton."""

import gzip
import json
import shutil
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from foundation.machine.process import environment
from triton_repo.front import limits
from triton_repo.front.bodies import Wanted, read_body, write_body
from triton_repo.front.limits import Load, Rejected
from triton_repo.front.settings import Settings
from triton_repo.front.tensors import check_raw, check_request
from triton_repo.safe_folder import safe_folder

ROOT = Path(__file__).parents[2]
GOOD = {"inputs": [{"name": "TEXT", "shape": [2, 1], "datatype": "BYTES", "data": [["a fine film"], ["n\u00e4h"]]}]}


def good(**changes) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(struct.pack("<I", 2) + b"ab")
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def read(document) -> pb.ModelInferRequest:
    return read_body("m", "", json.dumps(document).encode(), None)[0]


def test_json_becomes_raw_tensors():
    request = read(GOOD)
    assert request.raw_input_contents[0] == b"\x0b\0\0\0a fine film\x04\0\0\0n\xc3\xa4h"
    assert (request.inputs[0].name, list(request.inputs[0].shape)) == ("TEXT", [2, 1])
    numbers = {"inputs": [{"name": "X", "shape": [2, 2], "datatype": "INT16", "data": [[1, 2], [3, -4]]}]}
    assert read(numbers).raw_input_contents[0] == np.int16([1, 2, 3, -4]).tobytes()


def test_binary_tensors_follow_the_json():
    entry = {"name": "X", "shape": [3], "datatype": "FP32", "parameters": {"binary_data_size": 12}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    request, wanted = read_body("m", "1", head + np.float32([1, 2, 3]).tobytes(), len(head))
    assert (request.raw_input_contents[0], wanted) == (np.float32([1, 2, 3]).tobytes(), Wanted(True, {}))
    for body, size in ((head + b"\0" * 8, len(head)), (head + b"\0" * 16, len(head)), (head, len(head) + 1), (head, 0)):
        with pytest.raises(Rejected):
            read_body("m", "1", body, size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [2, -1]}, "axes"),
        ({"shape": [2**40]}, "axes"),
        ({"shape": [2**21, 2**21]}, "elements"),
        ({"shape": [1] * 9}, "axes"),
        ({"shape": "x"}, "list of integers"),
        ({"shape": [True, 1]}, "list of integers"),
        ({"shape": [3, 1]}, "2 values given, 3 expected"),
        ({"datatype": "BF16"}, "datatype"),
        ({"datatype": "FP32"}, "not of the datatype"),
        ({"name": "../x"}, "no such name"),
        ({"name": 1}, "string is expected"),
        ({"data": None}, "must be a list"),
        ({"data": ["\ud800", "b"]}, "surrogate"),
        ({"data": [1, 2]}, "BYTES are strings"),
        ({"parameters": {"shared_memory_region": "r"}}, "only binary_data_size"),
        ({"parameters": {"binary_data_size": 10**20}}, "bytes are left"),
        ({"parameters": {"binary_data_size": -1}}, "bytes are left"),
        ({"parameters": {"binary_data_size": True}}, "bytes are left"),
    ],
)
def test_what_does_not_agree_is_named(change, message):
    with pytest.raises(Rejected, match=message):
        read({"inputs": [{**GOOD["inputs"][0], **change}]})


@pytest.mark.parametrize("data", [[10**400], [2**31], [1e400], [1.5], [True], ["1"], [None]])
def test_numbers_that_are_none_of_the_datatype(data):
    with pytest.raises(Rejected):
        read({"inputs": [{"name": "X", "shape": [1], "datatype": "INT32", "data": data}]})


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b'{"inputs":' * 100_000, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", b"", b"[]", b"\xff", b"9" * 5000]
)
def test_json_that_harms_a_parser_is_refused(text):
    with pytest.raises(Rejected):
        read_body("m", "", text, None)


def test_depth_and_size_of_json_are_limited(monkeypatch):
    data: list = ["x"]
    for _ in range(limits.MAX_JSON_DEPTH):
        data = [data]
    with pytest.raises(Rejected, match="too deep"):
        read({"inputs": [{"name": "X", "shape": [1], "datatype": "BYTES", "data": data}]})
    monkeypatch.setattr("triton_repo.front.bodies.MAX_JSON_BYTES", 100)
    with pytest.raises(Rejected, match="send tensors in the binary part") as caught:
        read({**GOOD, "id": "x" * 100})
    assert caught.value.status == 413


def test_answers_as_json_and_as_bytes():
    response = pb.ModelInferResponse(model_name="m", model_version="1", id="7")
    response.outputs.add(name="LABEL", datatype="BYTES", shape=[1, 1])
    response.outputs.add(name="LOGITS", datatype="FP32", shape=[1, 2])
    response.raw_output_contents.extend([b"\x04\0\0\0n\xc3\xa4h", np.float32([0.5, -1]).tobytes()])
    body, size = write_body(response, Wanted(False, {}))
    outputs = json.loads(body)["outputs"]
    assert ([one["data"] for one in outputs], size) == ([["n\u00e4h"], [0.5, -1.0]], None)
    body, size = write_body(response, Wanted(False, {"LOGITS": True}))
    assert body[size:] == np.float32([0.5, -1]).tobytes()
    assert json.loads(body[:size])["outputs"][1]["parameters"] == {"binary_data_size": 8}
    response.raw_output_contents[1] = np.float32([np.nan, 1]).tobytes()
    with pytest.raises(ValueError, match="JSON"):
        write_body(response, Wanted(False, {}))


def test_a_good_message_passes():
    check_request(good())
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="X", datatype="INT64", shape=[2]).contents.int64_contents.extend([1, 2])
    check_request(request)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: setattr(r, "model_name", "../../etc"),
        lambda r: setattr(r, "model_name", ""),
        lambda r: setattr(r, "model_version", "-1"),
        lambda r: setattr(r, "id", "x" * 300),
        lambda r: r.parameters["sequence_id"].__setattr__("int64_param", 1),
        lambda r: r.inputs[0].parameters["shared_memory_region"].__setattr__("string_param", "r"),
        lambda r: r.outputs.add(name="L").parameters["shared_memory_region"].__setattr__("string_param", "r"),
        lambda r: r.raw_input_contents.append(b""),
        lambda r: r.inputs[0].shape.append(-5),
        lambda r: r.inputs[0].contents.bytes_contents.append(b"ab"),
        lambda r: r.inputs.extend([r.inputs[0]] * 20),
        lambda r: r.outputs.extend([pb.ModelInferRequest.InferRequestedOutputTensor(name="L")] * 33),
        lambda r: r.ClearField("inputs"),
        lambda r: r.ClearField("raw_input_contents"),
    ],
)
def test_a_spoiled_message_does_not(spoil):
    request = good()
    spoil(request)
    with pytest.raises(Rejected):
        check_request(request)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.binary(max_size=20), max_size=8), cut=st.integers(0, 200), extra=st.binary(max_size=5))
def test_strings_hold_exactly_what_their_lengths_say(values, cut, extra):
    raw = b"".join(struct.pack("<I", len(value)) + value for value in values)
    check_raw("X", "BYTES", len(values), raw)
    for wrong in (raw[: cut % len(raw)] if raw else b"\0", raw + (extra or b"\xff")):
        if wrong != raw:
            with pytest.raises(Rejected):
                check_raw("X", "BYTES", len(values), wrong)


def test_the_bytes_under_way_are_limited():
    load = Load()
    with load.hold(limits.MAX_BYTES_UNDER_WAY):
        with pytest.raises(Rejected) as caught, load.hold(1):
            pass
        assert caught.value.status == 503
    with load.hold(1):
        assert load.held == 1
    assert load.held == 0


# --- the process


class Echo(service_pb2_grpc.GRPCInferenceServiceServicer):
    """In the place of Triton: answers with the first input."""

    def ServerLive(self, request, context):
        return pb.ServerLiveResponse(live=True)

    def ModelInfer(self, request, context):
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.outputs.add(name="ECHO", datatype=request.inputs[0].datatype, shape=request.inputs[0].shape)
        response.raw_output_contents.append(request.raw_input_contents[0])
        return response

    def ModelReady(self, request, context):
        return pb.ModelReadyResponse(ready=request.name != "absent")

    def ModelMetadata(self, request, context):
        return pb.ModelMetadataResponse(name=request.name)

    def RepositoryIndex(self, request, context):
        raise AssertionError("closed")

    def RepositoryModelUnload(self, request, context):
        return pb.RepositoryModelUnloadResponse()


def echo(path: Path) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Echo(), server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return server


@pytest.fixture(scope="module")
def front():
    folder = safe_folder()
    triton = echo(folder / "grpc")
    places = f"unix:{folder / 'grpc'}", str(folder / "metrics")
    asked = Settings("127.0.0.1", 0, 0, 0, *places, ("absent", "m"), aliases={"gone": "absent", "old": "m"})
    command = [sys.executable, "-m", "triton_repo.front.process", json.dumps(asdict(asked))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=ROOT)
    try:
        found = Settings(**json.loads(process.stdout.readline()))
        assert replace(found, grpc_port=0, http_port=0, metrics_port=0, models=tuple(found.models)) == asked
        yield found
        assert process.poll() is None, "the front died"
    finally:
        process.kill()
        process.wait()
        triton.stop(0)
        shutil.rmtree(folder)


def ask(front, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{front.http_port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


whole = pytest.mark.whole
INFER = "/v2/models/m/infer"


@whole
def test_http_goes_through(front):
    status, body = ask(front, INFER, json.dumps({**GOOD, "id": "7"}).encode())
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, ["a fine film", "n\u00e4h"])
    assert ask(front, "/v2/health/live")[0] == 200


@whole
@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        (INFER, b"[" * 200_000, {}, 400),
        (INFER, b"x" * (limits.MAX_REQUEST_BYTES + 1), {}, 413),
        (INFER, gzip.compress(b" " * 2**26), {"Content-Encoding": "gzip"}, 415),
        (INFER, b"{}", {"Inference-Header-Content-Length": "99999999999999"}, 400),
        (INFER, b"{}", {"Inference-Header-Content-Length": "-1"}, 400),
        ("/v2/models/../infer", b"{}", {}, 404),
        ("/v2/models/%2e%2e%2fx/infer", b"{}", {}, 404),
        ("/v2/systemsharedmemory/region/r/register", b"{}", {}, 404),
        ("/v2/cudasharedmemory/status", None, {}, 404),
        ("/v2/repository/index", None, {}, 405),
        ("/v2/repository/models/m/unload", b"{}", {}, 404),
        ("/v2/logging", b'{"log_verbose_level": 9}', {}, 404),
        ("/v2/trace/setting", b"{}", {}, 404),
        ("/v2/models/m/config", None, {}, 404),
        ("/v2/models/m/stats", None, {}, 404),
        (INFER, None, {}, 405),
    ],
)
def test_http_that_goes_no_further(front, path, body, headers, status):
    found, text = ask(front, path, body, **headers)
    assert (found, list(json.loads(text))) == (status, ["error"])


@whole
def test_bodies_in_a_hundred_thousand_chunks(front):
    body = json.dumps(GOOD).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 100_000 + body) + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.http_port), timeout=30) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + pieces)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")


@whole
def test_grpc_goes_through_and_the_rest_does_not(front):
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert stub.ModelInfer(good()).raw_output_contents[0] == b"\x02\0\0\0ab"
        calls = [
            (lambda: stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m")), grpc.StatusCode.PERMISSION_DENIED),
            (lambda: stub.LogSettings(pb.LogSettingsRequest()), grpc.StatusCode.PERMISSION_DENIED),
            (lambda: stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest()), grpc.StatusCode.PERMISSION_DENIED),
            (lambda: channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff" * 100), grpc.StatusCode.INVALID_ARGUMENT),
            (lambda: channel.unary_unary("/x/Y")(b""), grpc.StatusCode.PERMISSION_DENIED),
            (lambda: stub.ModelInfer(good(model_name="..")), grpc.StatusCode.NOT_FOUND),
            (lambda: stub.ModelInfer(good(id="x" * limits.MAX_REQUEST_BYTES)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ]
        for call, code in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == code, caught.value


@whole
def test_the_models_that_are_ready_are_listed(front):
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        found = service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryIndex(pb.RepositoryIndexRequest())
    assert [(one.name, one.state) for one in found.models] == [("m", "READY")]
    status, body = ask(front, "/v2/repository/index", b"")
    assert (status, json.loads(body)) == (200, [{"name": "m", "state": "READY"}])


@whole
def test_a_model_answers_to_an_earlier_name(front):
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(good(model_name="old")).model_name == "m"
        assert [stub.ModelReady(pb.ModelReadyRequest(name=name)).ready for name in ("old", "gone", "m")] == [True, False, True]
        assert stub.ModelMetadata(pb.ModelMetadataRequest(name="old")).name == "m"
    status, body = ask(front, "/v2/models/old/infer", json.dumps(GOOD).encode())
    assert (status, json.loads(body)["model_name"]) == (200, "m")
    assert [ask(front, f"/v2/models/{name}/ready")[0] for name in ("old", "gone")] == [200, 503]


@whole
def test_metrics_without_triton_are_an_error_and_not_a_death(front):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{front.metrics_port}/metrics", timeout=30)
    assert caught.value.code == 503
