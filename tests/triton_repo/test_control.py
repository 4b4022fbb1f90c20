"""The control socket: who may ask, and what is told. python -m pytest tests/triton_repo/test_control.py"""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from foundation.core.errors import InputError, Problem
from triton_repo.control import Control, ask, socket_of


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def handle(request, say):
    if request.get("wrong"):
        raise InputError.of([Problem("one", "1 given"), Problem("two", "2 given", "3 is allowed", "give 3")])
    if request.get("broken"):
        raise RuntimeError("a bug\nin two lines")
    say("working")
    return {"got": request}


def test_a_request_is_answered_and_what_is_said_comes_first(tmp_path):
    said = []
    with Control(tmp_path, handle):
        for number in range(3):
            assert ask(tmp_path, {"number": number}, said.append) == {"got": {"number": number}}
        assert said == ["working"] * 3
        with pytest.raises(InputError) as caught:
            ask(tmp_path, {"wrong": True}, said.append)
        assert caught.value.problems == (Problem("one", "1 given"), Problem("two", "2 given", "3 is allowed", "give 3"))
        with pytest.raises(InputError, match=r"a bug in two lines$"):
            ask(tmp_path, {"broken": True}, said.append)
        with socket.socket(socket.AF_UNIX) as mute:  # one that goes without a word does no harm
            mute.connect(str(socket_of(tmp_path)))
        assert ask(tmp_path, {}, said.append) == {"got": {}}
    assert not socket_of(tmp_path).parent.exists()


def test_a_long_temporary_folder_leaves_room_for_the_socket(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 60 * "a")
    short, served = socket_of(tmp_path), tmp_path
    assert str(short).startswith("/tmp/" + 60 * "a")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 90 * "a")
    path = socket_of(served)
    assert path.parts[:2] == ("/", "tmp")
    assert path.parts[-2:] == short.parts[-2:]
    with Control(served, handle):
        assert ask(served, {}, print) == {"got": {}}


def test_nobody_serves(tmp_path):
    for _ in range(2):
        with pytest.raises(InputError, match="is not being served; start it with `compress serve"):
            ask(tmp_path, {}, print)
        socket_of(tmp_path).parent.mkdir(mode=0o700, exist_ok=True)  # left behind


def test_a_folder_is_served_once(tmp_path):
    with Control(tmp_path, handle):
        with pytest.raises(InputError, match="is being served already"), Control(tmp_path, handle):
            pass
        assert ask(tmp_path, {}, print) == {"got": {}}


def test_the_socket_of_a_killed_server_is_replaced(tmp_path):
    socket_of(tmp_path).parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_of(tmp_path)))
    with Control(tmp_path, handle):
        assert ask(tmp_path, {}, print) == {"got": {}}


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    folder = socket_of(tmp_path).parent
    folder.mkdir()
    folder.chmod(0o755)
    for work in (lambda: ask(tmp_path, {}, print), lambda: Control(tmp_path, handle).__enter__()):
        with pytest.raises(InputError, match="is not a folder of yours alone"):
            work()
    folder.rmdir()
    os.symlink(tmp_path, folder)
    with pytest.raises(InputError, match="is not a folder of yours alone"):
        ask(tmp_path, {}, print)


def test_each_folder_has_a_socket_of_its_own(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert socket_of(tmp_path) == socket_of(Path(f"{tmp_path}/.")) == socket_of(tmp_path / "link")
    assert socket_of(tmp_path) != socket_of(tmp_path / "other")
