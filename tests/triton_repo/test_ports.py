"""Fixed ports, and what is said of a taken one: python -m pytest tests/triton_repo/test_ports.py"""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cli import app
from foundation.core.errors import InputError
from tests.triton_repo.test_chosen import deployed
from triton_repo import ports, service, serving
from triton_repo.server import ADDRESS, free_port
from triton_repo.service import Service


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as one:
        one.bind((ADDRESS, 0))
        one.listen()
        yield int(one.getsockname()[1])


def test_the_ports_are_those_of_triton() -> None:
    assert ports.FIXED == (8001, 8000, 8002)


def test_a_taken_port_is_named_with_what_to_do(taken: int) -> None:
    free = free_port()
    ports.check_ports(ADDRESS, (free, 0, 0))
    with pytest.raises(InputError) as caught:
        ports.check_ports(ADDRESS, (free, taken, free))
    assert [line.split(":")[0] for line in caught.value.lines] == [f"--http-port {taken}", f"--metrics-port {free}"]
    assert "is taken" in caught.value.lines[0]
    assert "--http-port another port (0: a free one)" in caught.value.lines[0]
    assert "--grpc-port too" in caught.value.lines[1]


def test_a_port_of_connections_that_ended_is_free() -> None:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((ADDRESS, 0))
        one.listen()
        place = one.getsockname()
        with socket.create_connection(place) as client:
            accepted, _ = one.accept()
            accepted.close()  # the server closes first: its side waits in TIME_WAIT
            client.recv(1)
    ports.check_ports(ADDRESS, (place[1], 0, 0))


def listens(place: tuple[str, int], *options: int) -> bool:
    """Whether another socket can listen at a place."""
    with socket.socket() as one:
        for option in options:
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            one.bind(place)
            one.listen()
        except OSError:
            return False
        return True


def test_a_held_port_is_for_servers_that_share_it_alone() -> None:
    with ports.hold(ADDRESS, 0) as held:
        place = held.getsockname()
        assert not listens(place)
        assert not listens(place, socket.SO_REUSEADDR)
        assert listens(place, socket.SO_REUSEADDR, socket.SO_REUSEPORT)  # what gRPC sets; and again, as when a server has died
        assert listens(place, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        with socket.socket() as client:
            assert client.connect_ex(place) == errno.ECONNREFUSED
        with pytest.raises(InputError, match="is taken"):
            ports.check_ports(ADDRESS, (place[1], 0, 0))
    assert listens(place)


def test_a_taken_port_is_not_held(taken: int) -> None:
    with pytest.raises(InputError, match=f"--grpc-port {taken}: .* is taken"):
        ports.hold(ADDRESS, taken)


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port", "--metrics-port"])
def test_serve_says_so_in_one_line_before_anything_is_started(
    option: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = deployed(tmp_path / "folder", chosen=["quantize-int8"])
    monkeypatch.setattr(serving.environment, "check", lambda: SimpleNamespace(versions={}))
    monkeypatch.setattr(service, "safe_folder", lambda: pytest.fail("started"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others = [part for other in ("--grpc-port", "--http-port", "--metrics-port") if other != option for part in (other, "0")]
    result = CliRunner().invoke(app, ["serve", str(folder), option, str(taken), *others])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"{option} {taken}: ")
    assert "is taken" in line


@pytest.mark.whole
def test_a_port_that_is_taken_while_triton_starts_is_named_too(tmp_path: Path, taken: int) -> None:
    (tmp_path / "repository").mkdir()
    one = Service(tmp_path / "repository", SimpleNamespace(versions={}), tmp_path / "log", ports=(0, 0, taken))  # type: ignore[arg-type]
    (tmp_path / "log").write_text("")
    one._spawn_front()
    with pytest.raises(InputError, match=f"--metrics-port {taken}: .* is taken"):
        one._await_front()
