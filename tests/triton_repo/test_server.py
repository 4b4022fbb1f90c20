"""Starting and ending, with scripts in the place of the server."""

import os
import socket
from pathlib import Path

import pytest

from triton_repo import server
from triton_repo.environment import ServerEnvironment

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
    with pytest.raises(server.ServerError, match=r"^Triton exited: failed to load m: no module named x; log: .*/log$"):
        server.TritonServer(tmp_path, fake(tmp_path / "env", script), tmp_path / "log").__enter__()


def test_a_server_that_is_never_ready_is_ended(tmp_path):
    script = f"echo $$ > {tmp_path}/pid; sleep 600 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(server.ServerError, match=r"not ready within 1 s: the log is empty"):
        server.TritonServer(tmp_path, fake(tmp_path / "env", script), tmp_path / "log", seconds=1).__enter__()
    assert not any(alive(int((tmp_path / name).read_text())) for name in ("pid", "child"))


def test_it_is_started_again_when_a_port_was_taken(tmp_path):
    script = f"echo x >> {tmp_path}/starts; echo 'E1 1 x.cc:1] \"Socket 127.0.0.1:80 already in use\"'; exit 1"
    with pytest.raises(server.ServerError, match="already in use"):
        server.TritonServer(tmp_path, fake(tmp_path / "env", script), tmp_path / "log").__enter__()
    assert (tmp_path / "starts").read_text().split() == ["x"] * server.ATTEMPTS


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(server.tempfile, "tempdir", None)
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
    assert (tmp_path / "libraries").read_text().strip() == found.variables["LD_LIBRARY_PATH"]
    assert (tmp_path / "path").read_text().startswith(f"{found.path}/bin:")
    assert str(found.site).encode() not in (tmp_path / "watcher").read_bytes()


def test_ports_are_free_and_different():
    ports = server.free_ports()
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as one:
            one.bind((server.ADDRESS, port))


def test_command_line_binds_to_loopback(tmp_path):
    found = fake(tmp_path, "")
    command = server.command_line(Path("/repo"), found, Path("/backends"), (1, 2, 3), "mine-", ["a", "b"])
    for name, port in (("grpc", 1), ("http", 2), ("metrics", 3)):
        assert f"--{name}-address=127.0.0.1" in command
        assert f"--{name}-port={port}" in command
    assert [part for part in command if "load-model" in part] == ["--load-model=a", "--load-model=b"]
    assert "--backend-config=python,shm-region-prefix-name=mine-" in command
    assert command.index(str(found.binary)) == 3
    assert not any("explicit" in part for part in server.command_line(Path("/r"), found, Path("/b"), (1, 2, 3), "p"))


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
    with pytest.raises(server.ServerError, match="Triton exited"):
        one.check_alive()
