"""gRPC that goes to Triton itself, with the real server: python -m pytest -m slow tests/triton_repo/test_grpc_to_triton.py"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.triton_repo import tiny_exports as tiny
from triton_repo import client, environment, layout
from triton_repo.config import Scheduling
from triton_repo.entrance import Entrance
from triton_repo.queueing import Queue
from triton_repo.served_models import ServedModel
from triton_repo.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME, FOLDER = "run", "text-fp32"
"""What clients call the model, and its folder, which is an earlier name."""
BACK_WITHIN = 20.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("direct")
    exported = tiny.export(root / "export", tiny.text_preprocessor(), tiny.TEXTS, (("text", "fp32"),))
    scheduling = Scheduling(queue=Queue(max_requests=4))
    models = layout.served_models(exported)
    layout.write_repository(root / "repository", models, pairs=False, batch_sizes=(1,), max_batch_size=1, scheduling=scheduling)
    return root / "repository"


@pytest.fixture
def running(repository: Path, tmp_path: Path) -> Iterator[Service]:
    models = [ServedModel(NAME, FOLDER, FOLDER, "")]
    with Service(repository, environment.check(), tmp_path / "log", models=models, entrance=Entrance(grpc="triton")) as started:
        yield started


def server_process(running: Service) -> psutil.Process:
    assert running._triton is not None
    [found] = running._triton._servers
    return found


def listening(pid: int) -> set[int]:
    below = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {one.laddr.port for process in below for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def over_http(running: Service, name: str) -> list[float]:
    document = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [tiny.TEXTS[0]]}]}
    request = urllib.request.Request(f"http://{running.http_address}/v2/models/{name}/infer", json.dumps(document).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        outputs = {one["name"]: one["data"] for one in json.loads(answer.read())["outputs"]}
    logits: list[float] = outputs["LOGITS"]
    return logits


def test_triton_answers_grpc_and_the_front_http(running: Service) -> None:
    right = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS)
    np.testing.assert_array_equal(client.evaluate(running.grpc_address, NAME, tiny.TEXTS).logits, right)
    assert running._front is not None
    assert listening(server_process(running).pid) == {port(running.grpc_address)}
    assert listening(running._front.pid) == {port(running.http_address), port(running.metrics_address)}
    for name in (NAME, FOLDER):
        np.testing.assert_allclose(over_http(running, name), right[0], rtol=1e-6)
    with pytest.raises(client.RequestError, match=f"unknown model: '{FOLDER}'"):
        client.evaluate(running.grpc_address, FOLDER, tiny.TEXTS[:1])
    [remark] = running.remarks
    assert f"the earlier names of the models ({FOLDER}) answer over HTTP alone" in remark


def test_what_can_harm_the_server_is_closed_even_to_who_knows_the_key(running: Service) -> None:
    [option] = [part for part in server_process(running).cmdline() if "restricted" in part]
    found = re.search(r":([a-z-]+)=([0-9a-f]+)$", option)
    assert found is not None
    known = {f"triton-grpc-protocol-{found[1]}": found[2]}
    with InferenceServerClient(running.grpc_address) as asking:
        calls = [
            lambda **given: asking.load_model(NAME, **given),
            lambda **given: asking.unload_model(NAME, **given),
            lambda **given: asking.register_system_shared_memory("r", "/r", 64, **given),
            lambda **given: asking.register_cuda_shared_memory("r", b"eHh4", 0, 64, **given),
            lambda **given: asking.get_system_shared_memory_status(**given),
            lambda **given: asking.update_log_settings(settings={"log_verbose_level": 9}, **given),
            lambda **given: asking.update_trace_settings(settings={"trace_level": "TENSORS", "trace_file": "/tmp/x"}, **given),
        ]
        for call in calls:
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                call()
            with pytest.raises(InferenceServerException, match="metadata size exceeds hard limit"):
                call(headers=known)
        assert asking.is_model_ready(NAME)
        assert asking.get_model_metadata(NAME).name == NAME
        assert asking.get_model_config(NAME).config.max_batch_size == 1
        client.infer(asking, NAME, tiny.TEXTS[0])
        assert asking.get_inference_statistics(NAME).model_stats[0].inference_count >= 1


def malformed(generator: random.Random) -> bytes:
    """Returns a request with one field that has to be refused; small numbers and short texts alone."""
    request, word = good(), "".join(generator.choices("abcXYZ_-/. \u00e4\u4e2d", k=generator.randint(1, 20)))
    tensor = request.inputs[0]
    changes: list[Callable[[], object]] = [
        lambda: setattr(request, "model_name", f"{NAME}{word}"),
        lambda: setattr(request, "model_version", generator.choice(["2", "99", "x", word])),
        lambda: setattr(tensor, "name", f"TEXT{word}"),
        lambda: setattr(tensor, "datatype", generator.choice(["FP32", "INT64", "UINT8", "BOOL", "bytes", word])),
        lambda: tensor.shape.__setitem__(slice(None), generator.choice([[1], [2, 1], [1, 2], [1, 1, 1], [3, 3]])),
        lambda: request.raw_input_contents.pop(),
        lambda: request.raw_input_contents.__setitem__(0, good().raw_input_contents[0][: generator.randint(0, 7)]),
        lambda: request.inputs.append(tensor),
        lambda: request.inputs.pop(),
        lambda: request.outputs.add(name=f"LOGITS{word}"),
    ]
    generator.choice(changes)()
    return request.SerializeToString()


def test_malformed_requests_are_refused_by_triton_and_disturb_nobody(running: Service) -> None:
    right, generator, over = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS), random.Random(0), threading.Event()

    def ask() -> int:
        asked = 0
        while not over.is_set():
            np.testing.assert_array_equal(client.evaluate(running.grpc_address, NAME, tiny.TEXTS, 1).logits, right)
            asked += len(tiny.TEXTS)
        return asked

    codes: Counter[grpc.StatusCode] = Counter()
    with grpc.insecure_channel(running.grpc_address) as channel, ThreadPoolExecutor(1) as pool:
        call, beside = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"), pool.submit(ask)
        try:
            for message in [*(malformed(generator) for _ in range(500)), *(b"\xff" + generator.randbytes(50) for _ in range(50))]:
                with pytest.raises(grpc.RpcError) as caught:
                    call(message, timeout=30)
                codes[caught.value.code()] += 1
        finally:
            over.set()
        assert beside.result()
    assert codes.keys() <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL}, codes
    assert running.deaths == 0


@pytest.mark.parametrize("process", ["tritonserver", "stub"])
def test_clients_are_refused_while_triton_is_away_and_find_it_on_the_same_port(process: str, running: Service) -> None:
    address, before = running.grpc_address, server_process(running)
    assert running._triton is not None
    watcher = running._triton._process
    assert watcher is not None
    victim = next(one for one in psutil.Process(watcher.pid).children(recursive=True) if process in one.name())
    victim.send_signal(signal.SIGKILL)
    codes, deadline = set(), time.monotonic() + BACK_WITHIN
    while time.monotonic() < deadline:
        with grpc.insecure_channel(address) as channel:
            try:
                service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(good(), timeout=5)
            except grpc.RpcError as error:
                codes.add(error.code())
            else:
                if running.deaths:
                    break
        time.sleep(0.02)
    assert running.grpc_address == address
    assert running.deaths == 1
    assert not before.is_running()
    assert grpc.StatusCode.UNAVAILABLE in codes
    assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED}
    client.evaluate(address, NAME, tiny.TEXTS)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port(address)))


def good() -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=NAME)
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(b"\x04\0\0\0dull")
    return request


def errors(running: Service, count: int, **parameters: int) -> list[str]:
    """Sends requests at once; returns the messages of those that were not answered."""

    def ask(_: int) -> str:
        with InferenceServerClient(running.grpc_address) as asking:
            try:
                asking.infer(NAME, client.tensors([tiny.TEXTS[0]], InferInput), **parameters)
            except InferenceServerException as error:
                return f"{error.status()} {error.message()}"
        return ""

    with ThreadPoolExecutor(count) as pool:
        return [line for line in pool.map(ask, range(count)) if line]


def counted(running: Service) -> dict[str, float]:
    """Returns Triton's counter of requests without an answer, by reason."""
    with urllib.request.urlopen(f"http://{running.metrics_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [re.fullmatch(r'nv_inference_request_failure\{.*reason="(\w+)".*\} (\d+)', line) for line in lines]
    return {one[1]: float(one[2]) for one in found if one is not None}


def test_triton_counts_who_waits_too_long_and_nobody_whom_its_full_queue_refuses(running: Service) -> None:
    """The gap beside the alert rules of docker: whoever closes it changes the rules and the docs."""
    full = [line for _ in range(10) for line in errors(running, 48)]
    assert full
    assert all(re.search("StatusCode.UNAVAILABLE .*Exceeds maximum queue size", line) for line in full)
    assert counted(running)
    assert set(counted(running).values()) == {0}
    with InferenceServerClient(running.grpc_address) as asking:
        [statistics] = asking.get_inference_statistics(NAME).model_stats
    assert statistics.inference_stats.fail.count == 0
    late = [line for _ in range(10) for line in errors(running, 4, timeout=1) if "timeout expired" in line]
    assert late
    assert counted(running)["REJECTED"] == len(late)
