"""The control socket of `compress serve`: how another command of the same user asks the running server to roll a model over.

    <temporary folder>/compress-serve-<user>-<digest of the served folder>/control        Unix socket, in a folder that only its owner may
                                                                                          enter; below /tmp where that path is too long for
                                                                                          one

A request is one line of JSON. The answer is lines of JSON: `say` while it works, then `done` or `problems`. One request is worked on at a
time. There is no port: nobody but the owner reaches it, and not over the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foundation.core.errors import InputError, Problem
from foundation.core.shown import pasted, reason

SECONDS = 1800.0
"""Longest wait for the next line of an answer: a model is loaded meanwhile."""
MOST_BYTES = 65536
MOST_PATH, SHORT = 107, Path("/tmp")
"""Longest path of a Unix socket in bytes, and its folder if the temporary folder's path is too long."""
Handle = Callable[[dict[str, Any], Callable[[str], None]], dict[str, Any]]
"""Does what a request asks for; says lines meanwhile, and returns what is done."""


class Control:
    """Listens on the socket of a served folder; a context manager.

    Args:
        folder: The served folder.
        handle: Called with each request, in a thread.
    """

    def __init__(self, folder: Path, handle: Handle) -> None:
        self._path, self._handle, self._folder = socket_of(folder), handle, folder
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Listens.

        Raises:
            InputError: The folder is being served already, or somebody else owns the place of the socket.
        """
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_owner(self._path.parent)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as other:
            other.connect(str(self._path))
            raise InputError(
                f"{self._folder}", "is being served already", remedy="stop that server first, or roll it over with `compress rollout`"
            )
        self._path.unlink(missing_ok=True)  # of a server that was killed
        self._socket = listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self._path))
        listening.listen()
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="control socket", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stops listening; what is being worked on is not waited for."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError), connection.makefile("rwb") as stream:
                self._answer(stream)

    def _answer(self, stream: Any) -> None:
        def send(line: dict[str, Any]) -> None:
            stream.write(json.dumps(line).encode("utf-8") + b"\n")
            stream.flush()

        answer: dict[str, Any]
        try:
            asked = json.loads(stream.readline(MOST_BYTES))
            answer = {"done": self._handle(asked, lambda line: send({"say": line}))}
        except InputError as error:
            answer = {"problems": [asdict(problem) for problem in error.problems]}
        except Exception as error:  # reported to the caller; the server keeps running
            answer = {"problems": [asdict(Problem("", reason(error)))]}
        send(answer)


def ask(folder: Path, request: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Sends a request to the server of a folder and returns what is done.

    Args:
        folder: The served folder.
        request: The request.
        say: Called with each line that the server says meanwhile.

    Raises:
        InputError: The folder is not being served, or the request was not done; one line for each reason.
    """
    path = socket_of(folder)
    remedy = f"start it with `{pasted('compress', 'serve', folder)}`"
    absent = Problem(f"{folder}", "is not being served", remedy=remedy)
    if not path.parent.exists():
        raise InputError.of([absent])
    _check_owner(path.parent)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise InputError.of([absent]) from error
        connection.settimeout(SECONDS)
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps(request).encode("utf-8") + b"\n")
            stream.flush()
            for line in stream:
                answer = json.loads(line)
                if "problems" in answer:
                    raise InputError.of(Problem(**problem) for problem in answer["problems"])
                if "done" in answer:
                    done: dict[str, Any] = answer["done"]
                    return done
                say(str(answer["say"]))
    raise InputError(f"{folder}", "its server has ended", remedy="see its triton.log")


def socket_of(folder: Path) -> Path:
    """Returns the path of the socket of a served folder."""
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    inside = Path(f"compress-serve-{os.getuid()}-{digest}", "control")
    wanted = tempfile.gettempdir() / inside
    return wanted if len(os.fsencode(wanted)) <= MOST_PATH else SHORT / inside


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InputError(f"{folder}", "is not a folder of yours alone", remedy="remove it")
