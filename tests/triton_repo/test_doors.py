"""Keys and TLS of the server: who gets in, over HTTP and gRPC, and which settings a server does not start with."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from foundation.core.errors import InputError
from foundation.machine.process import environment
from triton_repo.entrance import Entrance
from triton_repo.front.doors import Doors
from triton_repo.front.settings import KEYS, Settings
from triton_repo.load import access
from triton_repo.load.connection import Connection, Model, address_of
from triton_repo.probe import Probe
from triton_repo.safe_folder import safe_folder

KEY, OTHER = "k" * 32, "o" * 32


@pytest.mark.parametrize(
    ("authorization", "opens"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer {OTHER}", True),
        (f"Bearer {KEY}".encode(), True),
        (None, False),
        ("", False),
        (KEY, False),
        (f"Basic {KEY}", False),
        (f"Bearer {KEY[:-1]}", False),
        (f"Bearer {KEY}x", False),
        (f"Bearer {KEY} {OTHER}", False),
        ("Bearer ", False),
        ("Bearer \udcff\u00e4", False),
    ],
)
def test_any_key_opens_and_nothing_else(authorization: Any, opens: bool) -> None:
    assert Doors((KEY, OTHER)).admits(authorization) is opens
    assert Doors().admits(authorization)


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(Doors((KEY,)))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "certificate.pem"), str(folder / "key.pem")
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", *name]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.mark.parametrize(
    ("address", "keys", "tls", "wrong"),
    [
        ("127.0.0.1", "", False, []),
        ("127.0.0.5", KEY, True, []),
        ("0.0.0.0", KEY, True, []),
        ("0.0.0.0", "", True, ["--address"]),
        ("0.0.0.0", KEY, False, ["--address"]),
        ("10.1.2.3", "", False, ["--address", "--address"]),
        ("localhost", KEY, True, ["--address 'localhost'"]),
        ("127.0.0.1", "short", False, [KEYS]),
        ("127.0.0.1", KEY + " " + "\u00e4" * 20, False, [KEYS]),
    ],
)
def test_a_server_that_others_reach_has_keys_and_tls(
    address: str, keys: str, tls: bool, wrong: list[str], certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS, keys)
    entrance = Entrance(address, *(certificate if tls else ("", "")))
    with pytest.raises(InputError) if wrong else nullcontext() as caught:
        entrance.check()
    if caught is not None:
        assert [problem.key for problem in caught.value.problems] == wrong
        assert not any(key in str(caught.value) for key in keys.split())


@pytest.mark.parametrize(
    ("address", "keys", "tls", "given"),
    [
        ("127.0.0.1", "", False, None),
        ("127.0.0.5", "", False, None),
        ("127.0.0.1", KEY, False, KEYS),
        ("127.0.0.1", "", True, "--tls"),
        ("0.0.0.0", "", False, "--address 0.0.0.0"),
        ("10.1.2.3", KEY, True, "--address 10.1.2.3"),
    ],
)
def test_triton_answers_grpc_itself_only_where_nobody_has_to_show_a_key(
    address: str, keys: str, tls: bool, given: str | None, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS, keys)
    with nullcontext() if given is None else pytest.raises(InputError) as caught:
        Entrance(address, *(certificate if tls else ("", "")), "triton").check()
    if caught is not None:
        [problem] = caught.value.problems
        assert problem.key == "--grpc triton"
        assert problem.given == f"given with {given}, and Triton's gRPC checks no keys"


@pytest.mark.whole
def test_a_front_without_grpc_serves_http_alone() -> None:
    with front(Entrance(grpc="triton"), "") as settings:
        ports = {settings.http_port, settings.metrics_port}
        listening = {
            one.laddr.port
            for process in psutil.Process().children(recursive=True)
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
        assert listening == ports
        assert settings.grpc_port == 0
        assert status(f"http://127.0.0.1:{settings.http_port}/v2/health/ready", None, None) == 200


@pytest.mark.parametrize("swapped", [True, False])
def test_files_that_are_no_certificate_are_named(swapped: bool, certificate: tuple[str, str], tmp_path: Path) -> None:
    files = certificate[::-1] if swapped else (certificate[0], str(tmp_path / "missing.pem"))
    with pytest.raises(InputError) as caught:
        Entrance("127.0.0.1", *files).check()
    assert caught.value.problems[0].key.startswith("--tls")


@contextmanager
def front(entrance: Entrance, keys: str) -> Iterator[Settings]:
    """The process of the front before a Triton that is alive."""

    class Alive(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ServerLive(self, request: Any, context: Any) -> Any:
            return pb.ServerLiveResponse(live=True)

        def ServerReady(self, request: Any, context: Any) -> Any:
            return pb.ServerReadyResponse(ready=True)

        def ModelReady(self, request: Any, context: Any) -> Any:
            return pb.ModelReadyResponse(ready=True)

        def ModelMetadata(self, request: Any, context: Any) -> Any:
            tensor = pb.ModelMetadataResponse.TensorMetadata(name="TEXT", datatype="BYTES", shape=[-1, 1])
            return pb.ModelMetadataResponse(name=request.name, inputs=[tensor])

        def ServerMetadata(self, request: Any, context: Any) -> Any:
            return pb.ServerMetadataResponse(name="triton", version="0")

    folder = safe_folder()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Alive(), server)
    server.add_insecure_port(f"unix:{folder / 'grpc'}")
    server.start()
    asked = Settings(
        entrance.address,
        0,
        0,
        0,
        f"unix:{folder / 'grpc'}",
        str(folder / "none"),
        certificate=entrance.certificate,
        private_key=entrance.private_key,
        serves_grpc=not entrance.is_direct,
    )
    command = [sys.executable, "-m", "triton_repo.front.process", json.dumps(asdict(asked))]
    process = subprocess.Popen(command, env=environment(**{KEYS: keys}), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert KEY.encode() not in line
        yield Settings(**json.loads(line))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        server.stop(None)
        shutil.rmtree(folder)


def status(url: str, context: ssl.SSLContext | None, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.whole
@pytest.mark.parametrize("tls", [True, False])
def test_http_and_grpc_ask_for_the_key(tls: bool, certificate: tuple[str, str]) -> None:
    context = ssl.create_default_context(cafile=certificate[0]) if tls else None
    scheme = "https" if tls else "http"
    with front(Entrance("127.0.0.1", *(certificate if tls else ("", ""))), KEY) as settings:
        address = f"{scheme}://127.0.0.1:{settings.http_port}"
        assert [status(f"{address}/v2", context, key) for key in (None, OTHER, KEY)] == [401, 401, 200]
        assert status(f"{address}/v2/health/live", context, None) == 200
        assert status(f"{scheme}://127.0.0.1:{settings.metrics_port}/metrics", context, None) == 401
        place = f"127.0.0.1:{settings.grpc_port}"
        secure = grpc.ssl_channel_credentials(Path(certificate[0]).read_bytes())
        with grpc.secure_channel(place, secure) if tls else grpc.insecure_channel(place) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerLive(pb.ServerLiveRequest()).live
            for key in (None, OTHER):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=() if key is None else (("authorization", f"Bearer {key}"),))
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=(("authorization", f"Bearer {KEY}"),)).name == "triton"
        if tls:
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                status(f"http://127.0.0.1:{settings.http_port}/v2", None, KEY)


async def described(url: str, ca: str) -> Model:
    async with Connection(address_of(url, None, ca=ca)) as connection:
        return await connection.model("m")


@pytest.mark.whole
def test_our_clients_send_the_key_and_trust_the_certificate(certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with front(Entrance("127.0.0.1", *certificate), KEY) as settings:
        for url in (f"grpcs://127.0.0.1:{settings.grpc_port}", f"https://127.0.0.1:{settings.http_port}"):
            monkeypatch.setenv(access.KEY, KEY)
            with Probe(address_of(url, None, "--url", certificate[0])) as server:
                assert server.about() == "triton 0"
            assert asyncio.run(described(url, certificate[0])) == Model("m", ("TEXT",))
            for key in ("", OTHER):
                monkeypatch.setenv(access.KEY, key)
                with Probe(address_of(url, None, "--url", certificate[0])) as server, pytest.raises(InputError) as caught:
                    server.about()
                assert access.KEY in caught.value.problems[0].remedy
                assert OTHER not in str(caught.value)
                with pytest.raises(InputError) as caught:
                    asyncio.run(described(url, certificate[0]))
                assert access.KEY in caught.value.problems[0].remedy
            with pytest.raises(InputError) as caught:
                asyncio.run(described(url, ""))  # a certificate that nobody vouches for
            assert caught.value.problems[0].key == f"--server {url}"


@pytest.mark.parametrize(
    ("url", "key", "ca", "wrong"),
    [
        ("http://127.0.0.1:1", KEY, False, None),
        ("localhost:1", KEY, False, None),
        ("https://example.com:1", KEY, True, None),
        ("example.com:1", "", False, None),
        ("http://example.com:1", KEY, False, "--server 'http://example.com:1'"),
        ("10.1.2.3:1", KEY, False, "--server '10.1.2.3:1'"),
        ("grpcs://example.com:1", "\u00e4" * 20, False, access.KEY),
        ("grpcs://example.com:1", f"{KEY} {OTHER}", False, access.KEY),
        ("http://127.0.0.1:1", "", True, "--ca"),
    ],
)
def test_a_key_is_never_sent_in_the_clear(
    url: str, key: str, ca: bool, wrong: str | None, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(access.KEY, key)
    with pytest.raises(InputError) if wrong else nullcontext() as caught:
        assert KEY not in repr(address_of(url, None, ca=certificate[0] if ca else ""))
    if caught is not None:
        assert caught.value.problems[0].key.startswith(str(wrong))
        assert not key or key not in str(caught.value)


def test_a_file_without_certificates_is_not_trusted(certificate: tuple[str, str], tmp_path: Path) -> None:
    for file in (certificate[1], str(tmp_path / "missing.pem")):
        with pytest.raises(InputError) as caught:
            address_of("https://127.0.0.1:1", None, ca=file)
        assert caught.value.problems[0].key == f"--ca {file}"
