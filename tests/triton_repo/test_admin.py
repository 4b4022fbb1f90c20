"""Loading and unloading over a Unix socket, with a stand-in for Triton: python -m pytest tests/triton_repo/test_admin.py"""

from __future__ import annotations

import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from triton_repo import admin
from triton_repo.safe_folder import safe_folder

ANSWERS = {
    "good": (200, b""),
    "json": (400, b'{"error":"failed to load\\n  \'json\'"}'),
    "text": (500, b"out of\norder"),
    "list": (400, b"[1]"),
    "empty": (404, b""),
}


class Handler(BaseHTTPRequestHandler):
    """Answers by the name of the model, and notes what came."""

    seen: list[str]

    def do_POST(self) -> None:
        self.seen.append(self.path)
        model, verb = self.path.split("/")[-2:]
        if model == "slow":
            time.sleep(0.3)
        assert verb in ("load", "unload")
        status, body = ANSWERS.get(model, ANSWERS["good"])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def triton() -> Iterator[tuple[Path, list[str]]]:
    folder, seen = safe_folder(), list[str]()
    server = Server(str(folder / "admin"), type("Noting", (Handler,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder / "admin", seen
    server.shutdown()
    thread.join()
    server.server_close()
    shutil.rmtree(folder)


def test_a_model_is_loaded_and_unloaded(triton: tuple[Path, list[str]]) -> None:
    path, seen = triton
    admin.load(path, "good", 5)
    admin.unload(path, "good.0a1b", 5)
    assert seen == ["/v2/repository/models/good/load", "/v2/repository/models/good.0a1b/unload"]


@pytest.mark.parametrize(
    ("model", "line"),
    [("json", "failed to load 'json'"), ("text", "out of order"), ("list", r"\[1\]"), ("empty", "status 404"), ("slow", "within 0 s")],
)
def test_what_went_wrong_is_one_line(model: str, line: str, triton: tuple[Path, list[str]]) -> None:
    with pytest.raises(admin.AdminError, match=f"{line}$") as caught:
        admin.load(triton[0], model, 0.1)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(admin.AdminError, match="No such file"):
        admin.unload(tmp_path / "none", "m", 1)
