"""The served repository under attack: sudden deaths, and random requests over both protocols. Needs the server environment.

The attack lasts COMPRESS_TEST_FUZZ_SECONDS, ten minutes if that is not set.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc import service_pb2 as pb

from tests.triton_repo import tiny_exports as tiny
from triton_repo import client, environment, layout, service
from triton_repo.front.limits import MAX_REQUEST_BYTES
from triton_repo.server import ServerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TEXT, IMAGE = "text-fp32", "image-fp32"
SECONDS = float(os.environ.get("COMPRESS_TEST_FUZZ_SECONDS", "600"))
BACK_WITHIN = 5.0
ATTACKERS = 3


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("service")
    for name, prepared, rows in (("text", tiny.text_preprocessor(), tiny.TEXTS), ("image", tiny.image_preprocessor(), tiny.IMAGES)):
        exported = tiny.export(root / name, prepared, rows, ((name, "fp32"),))
        layout.write_repository(root / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    return root / "repository"


@pytest.fixture
def running(repository, tmp_path):
    with service.Service(repository, environment.check(), tmp_path / "log") as started:
        yield started


def answers_rightly(running) -> None:
    answers = client.evaluate(running.grpc_address, TEXT, tiny.TEXTS)
    np.testing.assert_array_equal(answers.logits, tiny.expected(tiny.text_preprocessor(), tiny.TEXTS))


def back_within(running, seconds: float) -> None:
    """Waits until the service answers rightly, at most so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return answers_rightly(running)
        except client.RequestError:
            running.check_alive()
            assert time.monotonic() < deadline, f"not back within {seconds} s"
            time.sleep(0.05)


def below(process, name: str) -> psutil.Process:
    return next(one for one in psutil.Process(process.pid).children(recursive=True) if name in one.name())


def test_killed_servers_and_fronts_come_back_on_the_same_ports(running, tmp_path):
    addresses = running.grpc_address, running.http_address, running.metrics_address
    for name, number in (("tritonserver", signal.SIGKILL), ("python", signal.SIGKILL), ("tritonserver", signal.SIGSEGV)):
        process = running._triton._process if name == "tritonserver" else running._front
        one = below(process, name)
        one.send_signal(number)
        one.wait(10)
        back_within(running, BACK_WITHIN)
    assert (running.grpc_address, running.http_address, running.metrics_address) == addresses
    log = (tmp_path / "log").read_text()
    assert "Triton exited: killed by SIGKILL; log: " in log
    assert "the front of Triton exited: killed by SIGKILL" in log
    assert "Triton exited: killed by SIGSEGV; log: " in log
    assert "it is started again (3 of 20 times within 600 s)" in log


def test_a_model_process_that_is_killed_comes_back(running, tmp_path):
    """Triton lives on, and its backend does not always start the model again."""
    for _ in range(3):
        below(running._triton._process, "stub").kill()
        time.sleep(0.5)
        back_within(running, BACK_WITHIN)
    assert "a model process of Triton died" in (tmp_path / "log").read_text()


def test_a_server_that_keeps_dying_is_given_up_with_the_cause(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "RESTARTS", 1)
    with service.Service(repository, environment.check(), tmp_path / "log") as running:
        for _ in range(2):
            below(running._triton._process, "tritonserver").kill()
            if running._over.wait(BACK_WITHIN):
                break
            back_within(running, BACK_WITHIN)
        running.wait()
        with pytest.raises(ServerError, match=r"SIGKILL; log: .* 2 times within 600 s .*not started"):
            running.check_alive()


def test_random_requests_kill_nothing(running, tmp_path):
    """The attack: after each second of it the answers are unchanged, or are again within five."""
    end, failures, sent = time.monotonic() + SECONDS, [], [0] * ATTACKERS

    def attack(number: int) -> None:
        generator = random.Random(number)
        while time.monotonic() < end:
            try:
                generator.choice(ATTACKS)(running, generator)
                sent[number] += 1
            except Exception as error:  # a failure of the test itself must not end the attack unseen
                failures.append(repr(error))
                return

    attackers = [threading.Thread(target=attack, args=(number,)) for number in range(ATTACKERS)]
    for one in attackers:
        one.start()
    try:
        while time.monotonic() < end and not failures:
            time.sleep(1)
            back_within(running, BACK_WITHIN)
    finally:
        end = 0.0
        for one in attackers:
            one.join()
    answers_rightly(running)
    print(f"{sum(sent)} attacks in {SECONDS:.0f} s, {running.deaths} deaths\n{(tmp_path / 'log').read_text()[-2000:]}")
    assert failures == []
    assert "Traceback" not in (tmp_path / "log").read_text()  # clients cannot fill the disk with it
    assert min(sent) > 0


# --- attacks: each sends something, reads what comes, and expects nothing of it


def _exchange(address: str, data: bytes, generator: random.Random, wait: bool = True) -> None:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(data)
        if generator.random() < 0.2:  # leave in the middle
            return
        while wait and connection.recv(65536):
            continue


def _post(body: bytes, path: str = f"/v2/models/{TEXT}/infer", head: str = "", method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _noise(generator: random.Random, most: int = 2000) -> bytes:
    return generator.randbytes(generator.randrange(most))


def _mutated(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.randrange(1, 8)):
        place = generator.randrange(len(changed) + 1)
        choice = generator.random()
        if choice < 0.5 and place < len(changed):
            changed[place] = generator.randrange(256)
        elif choice < 0.75:
            changed[place:place] = _noise(generator, 16)
        else:
            del changed[place : place + generator.randrange(16)]
    return bytes(changed)


def _document(generator: random.Random):
    shape = generator.choice([[1, 1], [2, 1], [-1, 1], [2**31, 2**31], [0, 1], [1] * 30, [], None, [1.5], ["1"], [10**30]])
    data = generator.choice([["dull"], [["dull"], ["fine"]], "dull", None, [], [None], [{"a": 1}], [1e308], ["\ud800"], ["\x00" * 100]])
    entry = {"name": generator.choice(["TEXT", "IMAGE", "", "x" * 1000, 3]), "shape": shape, "data": data}
    entry["datatype"] = generator.choice(["BYTES", "FP32", "INT64", "FP16", "", None, "\u0000"])
    if generator.random() < 0.4:
        size = generator.choice([0, 1, -1, 2**31, 2**63, "4", 4.0])
        entry["parameters"] = {generator.choice(["binary_data_size", "shared_memory_region", "shared_memory_byte_size"]): size}
    document = {
        "inputs": generator.choice([[entry], [entry] * 3, entry, [], [entry] * 1000]),
        "id": generator.choice(["", "7", 7, "x" * 500]),
    }
    if generator.random() < 0.4:
        parameters = generator.choice([{}, {"binary_data": True}, {"classification": 10**9}, {"shared_memory_region": "r"}])
        document["outputs"] = [{"name": generator.choice(["LOGITS", "", "nothing"]), "parameters": parameters}]
    return document


def http_noise(running, generator) -> None:
    _exchange(generator.choice([running.http_address, running.metrics_address]), _noise(generator), generator)


def http_bombs(running, generator) -> None:
    bombs = [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"inputs":[' + b"{}," * 100_000 + b"{}]}",
        b"9" * 1_000_000,
        b'"' + b"\\u0000" * 100_000 + b'"',
    ]
    _exchange(running.http_address, _post(generator.choice(bombs)), generator)


def http_documents(running, generator) -> None:
    body = json.dumps(_document(generator)).encode()
    head = generator.choice(["", f"Inference-Header-Content-Length: {generator.choice([0, 1, len(body), 2**31, 2**70, -1])}\r\n"])
    _exchange(running.http_address, _post(body + _noise(generator, 50), head=head), generator)


def http_mutations(running, generator) -> None:
    good = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a fine film"]}]}
    _exchange(running.http_address, _mutated(_post(json.dumps(good).encode()), generator), generator)


def http_lies(running, generator) -> None:
    """Lengths that are wrong, compressed bombs, endless headers, tiny chunks."""
    start = f"POST /v2/models/{TEXT}/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    bomb = gzip.compress(b"[" * 10_000_000)
    data = generator.choice(
        [
            f"{start}Content-Length: {MAX_REQUEST_BYTES * 4}\r\n\r\n".encode() + b"x" * 100_000,
            f"{start}Content-Length: -5\r\n\r\n".encode(),
            f"{start}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n".encode(),
            _post(bomb, head="Content-Encoding: gzip\r\n"),
            _post(bomb, head="Content-Encoding: deflate\r\n"),
            start.encode() + b"X: y\r\n" * 20_000 + b"\r\n",
            start.encode() + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n",
            f"{start}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n[\r\n" * 50_000 + b"0\r\n\r\n",
            f"{start}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n".encode() + b"x" * 1000,
        ]
    )
    _exchange(running.http_address, data, generator)


def http_paths(running, generator) -> None:
    """Every path of Triton that is not for clients, and some that do not exist."""
    path = generator.choice(
        [
            "/v2/systemsharedmemory/region/r/register",
            "/v2/cudasharedmemory/region/r/register",
            "/v2/systemsharedmemory/unregister",
            "/v2/repository/index",
            f"/v2/repository/models/{TEXT}/load",
            f"/v2/repository/models/{TEXT}/unload",
            "/v2/logging",
            "/v2/trace/setting",
            f"/v2/models/{TEXT}/config",
            f"/v2/models/{TEXT}/stats",
            f"/v2/models/{TEXT}/generate",
            "/v2/models/" + "x" * 5000 + "/infer",
            "/v2/models/..%2f..%2fetc/infer",
            "/metrics",
            "/v2//////",
        ]
    )
    bodies = [
        b"",
        b'{"key": "/psm", "offset": 0, "byte_size": 18446744073709551615}',
        b'{"log_verbose_level": 9}',
        b'{"trace_level": ["TENSORS"]}',
    ]
    _exchange(
        running.http_address, _post(generator.choice(bodies), path, method=generator.choice(["GET", "POST", "PUT", "X" * 99])), generator
    )


def _message(generator: random.Random) -> bytes:
    request = pb.ModelInferRequest(model_name=generator.choice([TEXT, IMAGE, "", "..", "x" * 500]))
    for _ in range(generator.choice([0, 1, 1, 1, 2, 40])):
        name, kind = generator.choice(["TEXT", "IMAGE", "", "x" * 300]), generator.choice(["BYTES", "FP32", "INT64", "", "BF16"])
        tensor = request.inputs.add(
            name=name, datatype=kind, shape=generator.choice([[1, 1], [], [-1], [2**62, 4], [0], [1] * 100, [8, 1]])
        )
        if generator.random() < 0.2:
            tensor.parameters["shared_memory_region"].string_param = "r"
        if generator.random() < 0.3:
            tensor.contents.bytes_contents.append(_noise(generator, 50))
        else:
            request.raw_input_contents.append(
                generator.choice([b"\x04\0\0\0dull", b"\xff\xff\xff\x7fdull", b"", _noise(generator), b"\0" * 10**6])
            )
    if generator.random() < 0.3:
        request.parameters["sequence_id"].int64_param = -1
    return request.SerializeToString()


METHODS = [f"/inference.GRPCInferenceService/{name}" for name in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name]


def _call(running, method: str, body: bytes, **options) -> None:
    with grpc.insecure_channel(running.grpc_address) as channel, contextlib.suppress(grpc.RpcError):
        channel.unary_unary(method)(body, timeout=5, **options)


def grpc_messages(running, generator) -> None:
    body = _message(generator)
    _call(running, METHODS[0].rpartition("/")[0] + "/ModelInfer", _mutated(body, generator) if generator.random() < 0.5 else body)


def grpc_methods(running, generator) -> None:
    metadata = (("triton-key", "guess"), ("x", "y" * generator.choice([1, 100, 20_000])))
    _call(running, generator.choice([*METHODS, "/grpc.health.v1.Health/Check", "/x/y"]), _noise(generator, 200), metadata=metadata)


def grpc_registers(running, generator) -> None:
    with InferenceServerClient(running.grpc_address) as opened:
        with contextlib.suppress(Exception):
            opened.register_system_shared_memory("r", "/triton_python_backend_shm_region", 2**40)
        with contextlib.suppress(Exception):
            opened.register_cuda_shared_memory("r", b"eHh4", 0, 2**40)
        with contextlib.suppress(Exception):
            opened.update_log_settings(settings={"log_file": "/proc/self/mem"})


def grpc_large(running, generator) -> None:
    _call(running, f"{METHODS[0].rpartition('/')[0]}/ModelInfer", b"\0" * (MAX_REQUEST_BYTES + generator.randrange(-1000, 1000)))


def grpc_noise(running, generator) -> None:
    start = generator.choice(
        [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
    )
    _exchange(running.grpc_address, start + _noise(generator), generator)


def odd_rows(running, generator) -> None:
    """Well-formed requests with hostile contents."""
    row = generator.choice([b"", b"\xff", b"\x00" * 1000, "\u202e\U0001f600".encode() * 1000, _noise(generator, 100_000), b"a " * 10**6])
    request = pb.ModelInferRequest(model_name=generator.choice([TEXT, IMAGE]))
    request.inputs.add(name="TEXT" if request.model_name == TEXT else "IMAGE", datatype="BYTES", shape=[1, 1])
    picture = _mutated(tiny.IMAGES[0], generator)
    value = row if request.model_name == TEXT else picture
    request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    _call(running, f"{METHODS[0].rpartition('/')[0]}/ModelInfer", request.SerializeToString())


ATTACKS = [
    http_noise,
    http_bombs,
    http_documents,
    http_mutations,
    http_lies,
    http_paths,
    grpc_messages,
    grpc_methods,
    grpc_registers,
    grpc_large,
    grpc_noise,
    odd_rows,
]
