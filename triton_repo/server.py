"""Starts the Triton server and makes sure that it is stopped.

    with TritonServer(repository, environment.check(), log) as server:
        server.grpc_address

The server and the processes of its models form one process group under a watcher (`foundation.machine.process.spawn`). The watcher kills
the group when this process ends, even by SIGKILL; `triton_repo.leftovers` then removes its temporary files. All its paths are
safe (`triton_repo.safe_folder`).

It speaks gRPC, without the protocols that can harm it: shared memory, loading of models, logging, traces. Triton cannot switch these off,
only ask for a header with a key, and whoever is on the machine reads the key in the list of processes. So the key is longer than any header
that gRPC takes: nobody can send it. Models are loaded over HTTP, on a Unix socket that only the owner reaches (`triton_repo.admin`).

gRPC listens on a free port of loopback for the stage that measures it; or, `private`, on a Unix socket, before which `triton_repo.service`
puts the front; or at the `place` where clients are. Another process may take a free port before the server binds it. The server then exits
at once and is started again on another port.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import psutil

from foundation.machine.process import peak_memory_bytes, spawn
from triton_repo import admin, leftovers
from triton_repo.client import RequestError
from triton_repo.environment import ServerEnvironment
from triton_repo.front.settings import KEYS
from triton_repo.safe_folder import linked, safe_folder

ADDRESS = "127.0.0.1"
READY_SECONDS = 600.0
LOOK_SECONDS = 0.02
"""Time between two checks of a starting server."""
STOP_SECONDS = 60.0
WATCHER_SECONDS = 5.0
EXIT_SECONDS = 10
"""Time that a stopping server waits for requests in flight."""
ATTEMPTS = 3
HARMFUL = "shared-memory,model-repository,trace,logging"
"""Protocols that are closed."""
UNUSED = "model-config,statistics"
"""Protocols that only read; closed where nobody is to use them."""
KEY, KEY_BYTES = "triton-key", 20_000
"""Name and length of the key of the closed protocols. gRPC takes at most 16,384 bytes of headers."""
GONE_SECONDS = 60.0
"""Time for the process of a version that is no longer loaded to end."""
SERVICE = "compress-triton"
"""Name of the service in traces."""
TRACE_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""Variables with headers for the collector, whose values are URL-encoded."""
RARELY = 2**31 - 1
"""One of how many requests without a context is traced: Triton takes no 0 here."""
SOCKET_PORT = 1
"""gRPC calls the port of a Unix socket 1; Triton adds it to the name of the socket."""
_PORT_TAKEN = re.compile(r"address already in use|socket .* already in use|failed to (start|bind).*port", re.I)
_LOG_PREFIX = re.compile(r"^[EWI]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] ")
_ERROR = re.compile(r"^E\d{4} |^error: |Error|UNAVAILABLE|failed to ")
_SIGNAL = re.compile(r"^Signal \((\d+)\) received", re.M)
_THROWN = re.compile(r"^terminate called after throwing an instance of '([^']+)'\s+what\(\):([^\n]*)", re.M)


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
        private: Listen on a Unix socket instead of a port.
        place: Address and port for clients, which this process holds (`triton_repo.ports.hold`). Default: a free port of loopback.
            Metrics are offered on a Unix socket to whoever gives a place, or is private.
        traces: Address of a collector of OpenTelemetry for the spans of requests that come with a context; empty: none are made.
    """

    def __init__(
        self,
        repository: Path,
        environment: ServerEnvironment,
        log: Path,
        *,
        models: Sequence[str] | None = None,
        seconds: float = READY_SECONDS,
        private: bool = False,
        place: tuple[str, int] | None = None,
        traces: str = "",
    ) -> None:
        self._traces = traces
        self._repository, self._environment, self._log = repository.resolve(), environment, log
        self._models, self._seconds, self._private, self._place = models, seconds, private, place
        self._folder, self._at = Path(), place or (ADDRESS, 0)
        self._servers: list[psutil.Process] = []
        self._stubs: list[psutil.Process] = []
        self._log_start = 0
        """Offset of the current start in the log; once the server is ready, offset of the log after the start."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    @property
    def grpc_address(self) -> str:
        """Target of gRPC: host:port, or unix:path."""
        return f"unix:{self.grpc_socket}" if self._private else f"{self._at[0]}:{self._at[1]}"

    @property
    def grpc_socket(self) -> Path:
        """Socket of gRPC of a private server."""
        return self._folder / f"grpc:{SOCKET_PORT}"

    @property
    def metrics_socket(self) -> Path:
        """Socket of the Prometheus metrics."""
        return self._folder / "metrics"

    @property
    def _admin_socket(self) -> Path:
        return self._folder / "admin"

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
        """Stops the server.

        Raises:
            ServerError: A request failed because the server, or the process of a model, had died: it says how, and names the log.
        """
        try:
            if isinstance(error, RequestError):  # gRPC only knows that the connection was closed
                self.check_alive()
        except ServerError as died:
            raise ServerError(f"{died}; {error}") from error
        finally:
            self.stop()

    @property
    def is_alive(self) -> bool:
        """Whether the server runs, and the process of each model that ran when it was ready."""
        return self._runs and self._models_run

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _models_run(self) -> bool:
        return all(_lives(one) for one in self._stubs)

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes of the server and of its models."""
        return tuple(one.pid for one in (*self._servers, *self._stubs))

    def peak_memory_bytes(self) -> int | None:
        """Returns the largest resident sizes that the server and the processes of its models have had, added up; None where one has ended.

        A page that several of them share counts in each.
        """
        try:
            return sum(map(peak_memory_bytes, self.processes))
        except (FileNotFoundError, ProcessLookupError, StopIteration):  # of a process that has just ended
            return None

    def check_alive(self) -> None:
        """Raises `ServerError` if the server has exited; it says how, and quotes only what this server logged."""
        if self._process is not None and not self._models_run and not all(_lives(one) for one in self._servers):
            with suppress(subprocess.TimeoutExpired):  # models die with their server; its watcher, which knows how, exits a moment later
                self._process.wait(WATCHER_SECONDS)
        if self._runs and not self._models_run:  # the backend does not always start it again, and then refuses every request
            raise ServerError(f"a model process of Triton died: {last_error(self._tail())}; log: {self._log}")
        if not self._runs:
            status = None if self._process is None else self._process.returncode
            raise ServerError(f"Triton exited: {cause(status, self._tail())}; log: {self._log}")

    def load(self, model: str, seconds: float) -> None:
        """Loads the versions of a model that its configuration now names, and then unloads others; requests are answered all the while.

        The processes of the model are not watched from now on, because some of them end; see `watch`.

        Raises:
            ServerError: It failed, and the earlier versions are still loaded; or the server is not running.
        """
        self._stubs = [one for one in self._stubs if not _runs_model(one, model)]
        try:
            admin.load(self._admin_socket, model, seconds)
        except admin.AdminError as error:
            raise ServerError(f"model {model} was not loaded: {error}") from error

    def unload(self, model: str, seconds: float = GONE_SECONDS) -> None:
        """Unloads a model whose processes are not watched; returns once they have ended.

        Raises:
            ServerError: They have not ended in time, or the server is not running.
        """
        deadline = time.monotonic() + seconds
        try:
            admin.unload(self._admin_socket, model, seconds)
        except admin.AdminError as error:
            raise ServerError(f"model {model} was not unloaded: {error}") from error
        while any(_runs_model(one, model) for one in self._below("backend_stub")):
            if time.monotonic() > deadline:
                raise ServerError(f"model {model} still runs {seconds:.0f} s after it was unloaded; log: {self._log}")
            time.sleep(LOOK_SECONDS)

    def watch(self, model: str, version: str, instances: int) -> None:
        """Waits until all running processes of a model belong to one load of this version, and then watches them.

        Triton loads a version again next to the old one, so for a while the processes of both loads may run.

        Args:
            model: The model.
            version: Its version.
            instances: Number of its processes.

        Raises:
            ServerError: They have not ended in time.
        """
        deadline = time.monotonic() + GONE_SECONDS
        while True:
            found = [one for one in self._below("backend_stub") if _runs_model(one, model)]
            if len(found) == instances and all(_runs_model(one, model, version) for one in found):
                self._stubs = [*self._stubs, *found]
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"model {model}: more than {instances} of version {version} still run after {GONE_SECONDS:.0f} s; log: {self._log}"
                )
            time.sleep(0.05)

    def terminate(self) -> None:
        """Asks the server to end: it answers the accepted requests and no others. Does nothing if it is not running."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the server at once."""
        for one in self._servers:
            with suppress(psutil.NoSuchProcess):
                one.kill()  # its watcher, which sees that, ends the models
        self.stop()

    def stop(self) -> None:
        """Stops the server and its models; does nothing if it is not running."""
        self._servers, self._stubs = [], []
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
        self._at = self._place or (ADDRESS, free_port())
        prefix = f"compress-triton-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
        self._folder = folder = safe_folder()
        try:
            repository, environment = linked(folder, self._repository, self._environment)
            write_backend(folder / "backends" / "python", self._environment)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as output:
                self._log_start = output.tell()
                command = command_line(repository, environment, folder / "backends", prefix, self._models)
                command += address_options((f"unix:{folder / 'grpc'}", SOCKET_PORT) if self._private else self._at, self._place is not None)
                command += admin_options(self._admin_socket)
                command += metrics_options(self.metrics_socket if self._private or self._place else None)
                command += trace_options(self._traces)
                self._process = spawn(
                    command, env=_variables(), group=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._reaper = leftovers.reap(prefix, folder, self._process.pid)

    def _wait(self) -> None:
        """Waits until the server reports itself and its models ready."""
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        deadline = time.monotonic() + self._seconds
        while not self._listens():  # a channel of gRPC that finds nobody would wait a second and longer before it looks again
            self._check_time(deadline)
            time.sleep(LOOK_SECONDS)
        with InferenceServerClient(self.grpc_address) as client:
            while True:
                with suppress(InferenceServerException):  # it is about to answer
                    if client.is_server_ready(client_timeout=5):
                        break
                self._check_time(deadline)
                time.sleep(LOOK_SECONDS)
        self._log_start = self._log.stat().st_size
        self._servers, self._stubs = self._below("tritonserver"), self._below("backend_stub")

    def _check_time(self, deadline: float) -> None:
        """Raises `ServerError` if the server has exited, or is not ready in time."""
        self.check_alive()
        if time.monotonic() > deadline:
            raise ServerError(f"Triton was not ready within {self._seconds:.0f} s: {last_error(self._tail())}; log: {self._log}")

    def _listens(self) -> bool:
        """Whether something listens at the server's address; Triton does once its models are loaded."""
        family, address = (socket.AF_UNIX, str(self.grpc_socket)) if self._private else (socket.AF_INET, self._at)
        with socket.socket(family) as one:
            return one.connect_ex(address) == 0

    def _below(self, name: str) -> list[psutil.Process]:
        """Returns the processes below the watcher that have `name` in their command: the server, or the processes of the Python models."""
        assert self._process is not None, "started"
        try:
            return [one for one in psutil.Process(self._process.pid).children(recursive=True) if name in one.name()]
        except psutil.NoSuchProcess:  # it has just died, which the next look finds
            return []

    def _tail(self) -> str:
        """Returns the end of what the server logged since it was started or, later, since it was ready."""
        try:
            with self._log.open("rb") as stream:
                stream.seek(max(self._log_start, self._log.stat().st_size - 65536))
                return stream.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""


def free_port() -> int:
    """Returns a free port on loopback."""
    with socket.socket() as one:
        one.bind((ADDRESS, 0))
        return int(one.getsockname()[1])


def write_backend(folder: Path, environment: ServerEnvironment) -> None:
    """Writes the folder of the Python backend with the stub of the environment's Python; copies, because the server resolves links."""
    folder.mkdir(parents=True)
    for file in environment.backend_files:
        shutil.copy(file, folder)


def command_line(
    repository: Path, environment: ServerEnvironment, backends: Path, prefix: str, models: Sequence[str] | None = None
) -> list[str]:
    """Returns the command that starts the server, without its addresses; all paths in it are safe.

    `env` sets the variables for the server only: the Python that watches it must not load the server's libraries.

    Args:
        repository: Model repository.
        environment: The server environment.
        backends: Folder of the backends.
        prefix: Prefix of the names of shared memory.
        models: Models to load; None loads all.
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
        "--allow-sagemaker=false",
        "--allow-vertex-ai=false",
        f"--exit-timeout-secs={EXIT_SECONDS}",
    ]


def address_options(address: tuple[str, int], for_clients: bool) -> list[str]:
    """Returns the options for gRPC.

    Args:
        address: Address of gRPC, and its port.
        for_clients: Whether clients of others come there; the port is then held by this process, and statistics are offered.
    """
    closed = HARMFUL if for_clients else f"{HARMFUL},{UNUSED}"
    return [
        f"--grpc-address={address[0]}",
        f"--grpc-port={address[1]}",
        f"--reuse-grpc-port={str(for_clients).lower()}",
        f"--grpc-restricted-protocol={closed}:{KEY}={secrets.token_hex(KEY_BYTES // 2)}",
    ]


def admin_options(address: Path) -> list[str]:
    """Returns the options for HTTP on a Unix socket."""
    return ["--allow-http=true", f"--http-address=unix:{address}", f"--http-port={SOCKET_PORT}", "--http-thread-count=1"]


def metrics_options(address: Path | None) -> list[str]:
    """Returns the options for metrics on a Unix socket, or for none."""
    if address is None:
        return ["--allow-metrics=false"]
    return [f"--metrics-address=unix:{address}", f"--metrics-port={SOCKET_PORT}", "--allow-gpu-metrics=false"]


def trace_options(endpoint: str) -> list[str]:
    """Returns the options for spans of the requests that come with the context of a caller.

    Triton traces each of them, sampled or not, whatever its own rate is: the front gives a context only to sampled ones.

    Args:
        endpoint: Address of a collector of OpenTelemetry for traces; empty: nothing is traced.
    """
    if not endpoint:
        return []
    settings = ("mode=opentelemetry", f"opentelemetry,url={endpoint}", f"opentelemetry,resource=service.name={SERVICE}")
    return [f"--trace-config={setting}" for setting in (*settings, "level=TIMESTAMPS", f"rate={RARELY}")]


def cause(status: int | None, log: str) -> str:
    """Returns why the server exited.

    Args:
        status: Exit status; 128 + n stands for signal n. None: it does not run.
        log: What it logged.
    """
    if status is None:
        return "it is not running"
    known = {one.value for one in signal.Signals}
    logged = _SIGNAL.search(log)
    number = int(logged[1]) if logged else -status if status < 0 else status - 128
    if number in known:
        thrown = _THROWN.search(log)
        return f"killed by {signal.Signals(number).name}" + (f" ({thrown[1]}: {thrown[2].strip()})" if thrown else "")
    return last_error(log) if log.strip() else f"status {status}, the log is empty"


def _runs_model(process: psutil.Process, model: str, version: str | None = None) -> bool:
    """Whether a process runs a Python model, and this version of it; its command names the folder of the version."""
    try:
        return any(f"/{model}/{'' if version is None else f'{version}/'}" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that has died and was not waited for does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _variables() -> dict[str, str]:
    """Returns the environment variables of the server: ours, without those that lead Python elsewhere, and without the keys of clients;
    models write no byte code."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", KEYS)
    taken = {name: value for name, value in os.environ.items() if name not in left_out}
    plain = {name: unquote(taken[name]) for name in TRACE_HEADERS if name in taken}  # Triton's exporter sends %20 as it is
    return {**taken, **plain, "PYTHONDONTWRITEBYTECODE": "1"}


def last_error(log: str) -> str:
    """Returns the last error of a server log, without its timestamp and source location."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # the log always ends with "failed to load"; the cause is logged before
    errors = [line for line in lines if _ERROR.search(line) and "creating server" not in line and "|" not in line]
    line = (errors or lines or ["the log is empty"])[-1]
    return _LOG_PREFIX.sub("", line).strip('"')[:400]
