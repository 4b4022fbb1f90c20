"""Starting and ending, with scripts in the place of the server."""

import contextlib
import os
import re
import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from foundation.core.errors import InputError
from triton_repo import server
from triton_repo.client import RequestError
from triton_repo.environment import ServerEnvironment
from triton_repo.safe_folder import safe_folder

pytestmark = pytest.mark.whole


def fake(root: Path, script: str) -> ServerEnvironment:
    """A server environment whose server is a shell script."""
    found = ServerEnvironment(root, "3.11", root, root, {})
    for file in (found.binary, *found.backend_files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    found.binary.write_text(f"#!/bin/sh\n{script}\n")
    found.binary.chmod(0o755)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_early_death_quotes_the_log(tmp_path):
    script = """echo 'I1121 10:21:53.773 1 model.cc:3] "fine"'
echo 'E1121 10:21:53.773 1 model_lifecycle.cc:642] "failed to load m: no module named x"'
echo 'error: creating server: Internal - failed to load all models'; exit 1"""
    with pytest.raises(server.ServerError, match=r"failed to load m: no module named x; log: .*/log$"):
        server.TritonServer(tmp_path, fake(tmp_path / "env", script), tmp_path / "log").__enter__()


def test_a_server_that_is_never_ready_is_ended(tmp_path):
    script = f"echo $$ > {tmp_path}/pid; sleep 600 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(server.ServerError, match=r"not ready within 1 s: the log is empty"):
        server.TritonServer(tmp_path, fake(tmp_path / "env", script), tmp_path / "log", seconds=1).__enter__()
    assert not any(alive(int((tmp_path / name).read_text())) for name in ("pid", "child"))


def test_memory_is_that_of_the_server_and_its_models(tmp_path):
    one = server.TritonServer(tmp_path, fake(tmp_path / "env", ""), tmp_path / "log")
    assert one.peak_memory_bytes() == 0
    own = psutil.Process()
    one._servers, one._stubs = [own], [own]
    assert one.peak_memory_bytes() >= 2 * own.memory_info().rss * 0.9
    child = psutil.Popen(["true"])
    child.wait()
    one._stubs = [child]
    assert one.peak_memory_bytes() is None


def test_it_is_started_again_when_a_port_was_taken(tmp_path):
    script = f"echo x >> {tmp_path}/starts; echo 'E1 1 x.cc:1] \"Socket 127.0.0.1:80 already in use\"'; exit 1"
    with pytest.raises(server.ServerError, match="already in use"):
        server.TritonServer(tmp_path, fake(tmp_path / "env", script), tmp_path / "log").__enter__()
    assert (tmp_path / "starts").read_text().split() == ["x"] * server.ATTEMPTS


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    region = '/dev/shm/$(echo "$*" | grep -o "compress-triton-[0-9]*-[0-9a-f]*-")region'
    with pytest.raises(server.ServerError):
        server.TritonServer(tmp_path, fake(tmp_path / "env", f"echo > {region} && echo made; exit 1"), tmp_path / "log").__enter__()
    assert (tmp_path / "log").read_text() == "made\n"
    assert not list(Path("/dev/shm").glob(f"compress-triton-{os.getpid()}-*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env", "log"]


def test_the_script_sees_the_variables_and_the_watcher_does_not(tmp_path):
    script = (
        f"echo $LD_LIBRARY_PATH > {tmp_path}/libraries; echo $PATH > {tmp_path}/path; cat /proc/$PPID/environ > {tmp_path}/watcher; exit 1"
    )
    found = fake(tmp_path / "env", script)
    with pytest.raises(server.ServerError):
        server.TritonServer(tmp_path, found, tmp_path / "log").__enter__()
    libraries = (tmp_path / "libraries").read_text().strip().split(":")
    assert [Path(path).name for path in libraries] == ["nvidia_pytriton.libs", "libraries"]
    assert re.match(r"\S+/compress-triton-\w+/environment/bin:", (tmp_path / "path").read_text())
    assert str(found.site).encode() not in (tmp_path / "watcher").read_bytes()


def test_the_port_is_free():
    with socket.socket() as one:
        one.bind((server.ADDRESS, server.free_port()))


def test_command_line_binds_to_loopback(tmp_path):
    found = fake(tmp_path, "")
    command = server.command_line(Path("/repo"), found, Path("/backends"), "mine-", ["a", "b"])
    assert {"--grpc-address=127.0.0.1", "--grpc-port=1", "--reuse-grpc-port=false"} <= set(
        server.address_options((server.ADDRESS, 1), False)
    )
    assert {"--http-address=unix:/x", "--http-port=1"} <= set(server.admin_options(Path("/x")))
    assert server.metrics_options(None) == ["--allow-metrics=false"]
    assert [part for part in command if "load-model" in part] == ["--load-model=a", "--load-model=b"]
    assert "--backend-config=python,shm-region-prefix-name=mine-" in command
    assert command.index(str(found.binary)) == 3
    assert not any("explicit" in part for part in server.command_line(Path("/r"), found, Path("/b"), "p"))


def options(tmp_path: Path, **given: object) -> list[str]:
    """The options that a server is started with."""
    told = fake(tmp_path, 'echo "$@"; exit 1')
    with pytest.raises(server.ServerError), server.TritonServer(tmp_path, told, tmp_path / "log", **given):
        pass
    return (tmp_path / "log").read_text().splitlines()[-1].split()


@pytest.mark.parametrize("given", [{}, {"private": True}, {"place": ("127.0.0.1", 1)}])
def test_no_client_can_send_the_key_of_the_closed_protocols(given, tmp_path):
    """It is longer than all headers that gRPC takes, and drawn anew for each start."""
    closed = [next(part for part in options(tmp_path, **given) if "restricted" in part) for _ in range(2)]
    assert closed[0] != closed[1]
    protocols, name, key = re.fullmatch(r"--grpc-restricted-protocol=([a-z,-]+):([a-z-]+)=([0-9a-f]+)", closed[0]).groups()
    reading = set() if "place" in given else {"statistics", "model-config"}
    assert set(protocols.split(",")) == {"shared-memory", "model-repository", "logging", "trace"} | reading
    assert name == "triton-key"
    assert len(key) > 16384


def test_a_place_for_clients_is_shared_with_who_holds_it_and_has_metrics(tmp_path):
    found = options(tmp_path, place=("127.0.0.5", 4321))
    assert {"--grpc-address=127.0.0.5", "--grpc-port=4321", "--reuse-grpc-port=true"} <= set(found)
    assert any(part.startswith("--metrics-address=unix:") for part in found)
    assert "--allow-metrics=false" in options(tmp_path)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "the log is empty"),
        ("I1 x\nplain words\n", "plain words"),
        ('E1121 10:21:53.7 42 a.cc:1] "first"\nE1121 10:21:53.8 42 a.cc:2] "second"\nI1121 10:21:53.8 42 a.cc:2] "bye"\n', "second"),
        ('E1121 10:21:53.7 42 a.cc:1] "real"\nerror: creating server: Internal - failed to load all models\n| UNAVAILABLE: x |\n', "real"),
    ],
)
def test_last_error(log, line):
    assert server.last_error(log) == line


def test_stopping_twice_is_harmless(tmp_path):
    one = server.TritonServer(tmp_path, fake(tmp_path / "env", ""), tmp_path / "log")
    one.stop()
    with pytest.raises(server.ServerError, match="Triton exited: it is not running"):
        one.check_alive()


@pytest.mark.parametrize("name", ["a b", "a;touch PWNED", "$(touch PWNED)", "`touch PWNED`", "a,b:c", "'q\"", "-n", "neu\u00e9", "a\nb"])
def test_no_path_of_a_user_reaches_the_server(tmp_path, name):
    """Whatever repository, environment and log are called, the command, its variables and its folder have safe characters only."""
    root = tmp_path / name
    (root / "repository").mkdir(parents=True)
    script = f'{{ printf \'%s\\n\' "$0" "$@"; pwd; echo $LD_LIBRARY_PATH; }} > {tmp_path}/seen'
    script += f"; ls -L $(pwd)/repository > {tmp_path}/there; exit 1"
    found = fake(root / "env", script)
    (root / "repository" / "mine").touch()
    with pytest.raises(server.ServerError):
        server.TritonServer(root / "repository", found, root / "log", private=True).__enter__()
    seen = (tmp_path / "seen").read_text()
    assert re.fullmatch(r"[A-Za-z0-9._/:=,\-\n]+", seen)
    assert str(tmp_path) not in seen
    assert (tmp_path / "there").read_text() == "mine\n"
    assert not list(tmp_path.rglob("PWNED"))


def test_a_temporary_folder_with_a_space_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "a b"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = safe_folder()
    assert folder.parent != tmp_path / "a b"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match=r"TMPDIR: .* cannot be written to, or have a path"):
        safe_folder()


@pytest.mark.parametrize(
    ("status", "log", "line"),
    [
        (139, 'E1121 10:21:53.7 42 a.cc:1] "an old error"', "killed by SIGSEGV"),
        (134, "Signal (11) received.\n 0# 0x55 in tritonserver", "killed by SIGSEGV"),
        (
            134,
            "terminate called after throwing an instance of 'std::length_error'\n  what():  too long\nSignal (6) received.",
            "killed by SIGABRT (std::length_error: too long)",
        ),
        (-9, "", "killed by SIGKILL"),
        (1, 'E1121 10:21:53.7 42 a.cc:1] "the cause"', "the cause"),
        (1, "", "status 1, the log is empty"),
    ],
)
def test_the_cause_of_a_death(status, log, line):
    assert server.cause(status, log) == line


def test_a_death_after_it_was_ready_does_not_quote_what_was_logged_before(tmp_path):
    one = server.TritonServer(tmp_path, fake(tmp_path / "env", "kill -SEGV $$"), tmp_path / "log")
    (tmp_path / "log").write_text('E1121 10:21:53.7 42 a.cc:1] "an old error"\n')
    with pytest.raises(server.ServerError, match="Triton exited: killed by SIGSEGV"):
        one.__enter__()


@pytest.mark.parametrize("died", [True, False])
def test_a_request_that_fails_because_the_server_died_says_how_it_died(tmp_path, died):
    one = server.TritonServer(tmp_path, fake(tmp_path / "env", "kill -ABRT $$" if died else "exec sleep 600"), tmp_path / "log")
    one._start()
    if died:
        one._process.wait()

    def ask() -> None:
        with contextlib.ExitStack() as stack:
            stack.push(one)
            raise RequestError("row 3 of 9: Socket closed")

    with pytest.raises(server.ServerError if died else RequestError, match="Socket closed") as caught:
        ask()
    assert ("killed by SIGABRT" in str(caught.value)) == (f"log: {tmp_path / 'log'}" in str(caught.value)) == died
    assert not one._runs
