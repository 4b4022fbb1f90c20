"""Starts the Triton server on loopback and free ports, and makes sure that it is stopped.

    with TritonServer(repository, environment.check(), log) as server:
        server.grpc_address

The server and the processes of its models form one process group under a watcher (`compress.machine.process.spawn`). The watcher kills the
group when this process ends, even by SIGKILL; `triton_repo.leftovers` then removes its temporary files.

Another process may take a free port before the server binds it. The server then exits at once and is started again on other ports.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from compress.machine.process import spawn
from triton_repo import leftovers
from triton_repo.environment import ServerEnvironment

ADDRESS = "127.0.0.1"
READY_SECONDS = 600.0
STOP_SECONDS = 60.0
EXIT_SECONDS = 10
"""Time that a stopping server waits for requests in flight."""
ATTEMPTS = 3
_PORT_TAKEN = re.compile(r"address already in use|socket .* already in use|failed to (start|bind).*port", re.I)
_LOG_PREFIX = re.compile(r"^[EWI]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] ")
_ERROR = re.compile(r"^E\d{4} |^error: |Error|UNAVAILABLE|failed to ")


class ServerError(RuntimeError):
    """The server did not start, or exited; a one-line message that quotes its log."""


class TritonServer:
    """A running server; a context manager.

    Args:
        repository: Model repository.
        environment: The server environment.
        log: File for its output.
        models: Models to load; None loads the whole repository.
        seconds: Time limit for becoming ready.
    """

    def __init__(
        self,
        repository: Path,
        environment: ServerEnvironment,
        log: Path,
        *,
        models: Sequence[str] | None = None,
        seconds: float = READY_SECONDS,
    ) -> None:
        self._repository, self._environment, self._log = repository.resolve(), environment, log
        self._models, self._seconds = models, seconds
        self._ports: tuple[int, int, int] = (0, 0, 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def grpc_address(self) -> str:
        """host:port of gRPC."""
        return f"{ADDRESS}:{self._ports[0]}"

    @property
    def http_address(self) -> str:
        """host:port of HTTP."""
        return f"{ADDRESS}:{self._ports[1]}"

    @property
    def metrics_address(self) -> str:
        """host:port of the Prometheus metrics."""
        return f"{ADDRESS}:{self._ports[2]}"

    def __enter__(self) -> Self:
        """Starts the server and waits until every model is ready.

        Raises:
            ServerError: The server was not ready in time, or exited.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._start()
                self._wait()
                return self
            except BaseException as error:
                self.stop()
                if attempt < ATTEMPTS and isinstance(error, ServerError) and _PORT_TAKEN.search(self._tail()):
                    continue
                raise
        raise AssertionError("unreachable")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stops the server."""
        self.stop()

    def check_alive(self) -> None:
        """Raises `ServerError` if the server has exited."""
        if self._process is None or self._process.poll() is not None:
            raise ServerError(f"Triton exited: {last_error(self._tail())}; log: {self._log}")

    def wait(self) -> None:
        """Blocks until the server exits."""
        assert self._process is not None, "started"
        self._process.wait()

    def stop(self) -> None:
        """Stops the server and its models; does nothing if it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # kills the watcher; the kernel then kills the server
                process.wait()
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.wait()

    def _start(self) -> None:
        self._ports = free_ports()
        prefix = f"compress-triton-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
        backends = Path(tempfile.mkdtemp(prefix="compress-triton-"))
        write_backend(backends / "python", self._environment)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as output:
            command = command_line(self._repository, self._environment, backends, self._ports, prefix, self._models)
            variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
            self._process = spawn(command, env=variables, group=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        self._reaper = leftovers.reap(prefix, backends, self._process.pid)

    def _wait(self) -> None:
        """Waits until the server reports itself and its models ready."""
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        deadline = time.monotonic() + self._seconds
        with InferenceServerClient(self.grpc_address) as client:
            while True:
                self.check_alive()
                try:
                    if client.is_server_ready(client_timeout=5):
                        return
                except InferenceServerException:  # not listening yet
                    pass
                if time.monotonic() > deadline:
                    raise ServerError(f"Triton was not ready within {self._seconds:.0f} s: {last_error(self._tail())}; log: {self._log}")
                time.sleep(0.1)

    def _tail(self) -> str:
        """Returns the end of the log."""
        try:
            with self._log.open("rb") as stream:
                stream.seek(max(0, self._log.stat().st_size - 65536))
                return stream.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""


def free_ports() -> tuple[int, int, int]:
    """Returns three free ports on loopback, for gRPC, HTTP and metrics."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind((ADDRESS, 0))
        first, second, third = (one.getsockname()[1] for one in sockets)
        return first, second, third


def write_backend(folder: Path, environment: ServerEnvironment) -> None:
    """Writes the folder of the Python backend with the stub of the environment's Python; copies, because the server resolves links."""
    folder.mkdir()
    for file in environment.backend_files:
        shutil.copy(file, folder)


def command_line(
    repository: Path,
    environment: ServerEnvironment,
    backends: Path,
    ports: tuple[int, int, int],
    prefix: str,
    models: Sequence[str] | None = None,
) -> list[str]:
    """Returns the command that starts the server.

    `env` sets the variables for the server only: the Python that watches it must not load the server's libraries.
    """
    chosen = [] if models is None else ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
    return [
        "env",
        *(f"{name}={value}" for name, value in environment.variables.items()),
        str(environment.binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--disable-auto-complete-config",
        *chosen,
        f"--grpc-address={ADDRESS}",
        f"--grpc-port={ports[0]}",
        f"--http-address={ADDRESS}",
        f"--http-port={ports[1]}",
        f"--metrics-address={ADDRESS}",
        f"--metrics-port={ports[2]}",
        "--allow-gpu-metrics=false",
        f"--exit-timeout-secs={EXIT_SECONDS}",
    ]


def last_error(log: str) -> str:
    """Returns the last error of a server log, without its timestamp and source location."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # the log always ends with "failed to load"; the cause is logged before
    errors = [line for line in lines if _ERROR.search(line) and "creating server" not in line and "|" not in line]
    line = (errors or lines or ["the log is empty"])[-1]
    return _LOG_PREFIX.sub("", line).strip('"')[:400]
