"""Loads and unloads models of a running Triton, over HTTP on a Unix socket that only its owner reaches.

    POST /v2/repository/models/<model>/load        beside what answers; an earlier version ends when it has answered what it has
    POST /v2/repository/models/<model>/unload

Triton's gRPC has these methods too, but one address for all methods and clients. So there they are closed (`triton_repo.server`).
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

MOST_BYTES = 65536
"""Most bytes of an error message."""


class AdminError(RuntimeError):
    """Triton did not do it; a one-line message."""


class _Connection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        """Connects."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def load(path: Path, model: str, seconds: float) -> None:
    """Loads the versions of a model that its configuration names, and unloads its others.

    Args:
        path: The socket.
        model: The model.
        seconds: Time limit.

    Raises:
        AdminError: It failed; what was loaded before still is.
    """
    _post(path, f"/v2/repository/models/{model}/load", seconds)


def unload(path: Path, model: str, seconds: float) -> None:
    """Unloads a model; arguments and error as above."""
    _post(path, f"/v2/repository/models/{model}/unload", seconds)


def _post(path: Path, place: str, seconds: float) -> None:
    connection = _Connection(path, seconds)
    try:
        connection.request("POST", place, b"")
        answer = connection.getresponse()
        body = answer.read(MOST_BYTES)
    except TimeoutError as error:
        raise AdminError(f"no answer within {seconds:.0f} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise AdminError(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise AdminError(_message(body) or f"status {answer.status}")


def _message(body: bytes) -> str:
    """Returns the message of an error as one line: the key `error` of a JSON object, or the body."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return " ".join(str(found.get("error", text) if isinstance(found, dict) else text).split())[:400]
