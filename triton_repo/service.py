"""Serves a model repository to clients: Triton on private sockets, the front before it, and a supervisor that starts either again.

    with Service(repository, environment.check(), log) as service:
        service.grpc_address, service.http_address, service.metrics_address

    clients --> front --> link to the socket of the present Triton

Or gRPC goes to Triton itself (`Entrance.grpc`): then Triton listens on the port, which this process holds from start to start, and the
front serves HTTP and metrics alone.

    clients of gRPC --> Triton <-- front <-- clients of HTTP

Triton reads a copy of the repository (`triton_repo.live`), whose models can be rolled over to other versions while they answer
(`triton_repo.roll_over`). If Triton or the front dies, it is started again, on the same ports. Each death is logged with its cause. More
than `RESTARTS` deaths within `WINDOW_SECONDS` end the service: a server that dies with every request is not kept alive.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from foundation.machine.process import environment as child_environment
from foundation.machine.process import spawn
from triton_repo import leftovers, served_models
from triton_repo.blobs import BlobCache
from triton_repo.config import model_names
from triton_repo.entrance import Entrance
from triton_repo.environment import ServerEnvironment
from triton_repo.front.settings import Settings
from triton_repo.live import LiveRepository
from triton_repo.ports import FREE, Ports, check_ports, hold
from triton_repo.roll_over import Check, Rolled, roll_over
from triton_repo.safe_folder import safe_folder
from triton_repo.served_models import ServedModel
from triton_repo.server import ServerError, TritonServer, cause

RESTARTS, WINDOW_SECONDS = 20, 600.0
FRONT_SECONDS = 60.0
PERIOD_SECONDS = 0.1
"""Time between two looks at the processes."""


class Service:
    """A served repository; a context manager.

    Args:
        repository: Model repository.
        environment: The server environment.
        log: File for the output of server and front, and for each restart.
        blobs: Where compiled networks are kept between two starts; default: in the cache folder.
        ports: Ports of gRPC, HTTP and metrics; 0 takes a free one.
        models: The models to load; None: all of the repository, under the names of their folders.
        entrance: Where it listens, and what it asks of clients there.
        traces: Address of a collector of OpenTelemetry for traces of requests; empty: nothing is traced.
    """

    def __init__(
        self,
        repository: Path,
        environment: ServerEnvironment,
        log: Path,
        *,
        blobs: BlobCache | None = None,
        ports: Ports = FREE,
        models: Sequence[ServedModel] | None = None,
        entrance: Entrance | None = None,
        traces: str = "",
    ) -> None:
        self._repository, self._environment, self._log = repository, environment, log
        given = [ServedModel(name, name, name) for name in model_names(repository)] if models is None else models
        self._folders = {model.name: model.folder for model in given}
        self._folder = Path()
        self._entrance = entrance or Entrance()
        self._settings = Settings(
            self._entrance.address,
            *ports,
            "",
            "",
            tuple(self._folders),
            aliases=served_models.aliases(given),
            certificate=self._entrance.certificate,
            private_key=self._entrance.private_key,
            serves_grpc=not self._entrance.is_direct,
            traces=traces,
        )
        self._held: socket.socket | None = None
        """Holds the port of a Triton that clients reach themselves."""
        self._triton: TritonServer | None = None
        self._front: subprocess.Popen[bytes] | None = None
        self._live: LiveRepository | None = None
        self._blobs = BlobCache(environment.versions) if blobs is None else blobs
        self._changing = threading.Lock()
        """Held while Triton is started again, or a model is rolled over."""
        self._supervisor: threading.Thread | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        """Removes the folder if this process is killed."""
        self._ending, self._over = threading.Event(), threading.Event()
        self._failure: str | None = None
        self._deaths: list[float] = []

    @property
    def _ports(self) -> Ports:
        return self._settings.grpc_port, self._settings.http_port, self._settings.metrics_port

    @property
    def grpc_address(self) -> str:
        """host:port of gRPC."""
        return f"{self._settings.address}:{self._settings.grpc_port}"

    @property
    def http_address(self) -> str:
        """host:port of HTTP."""
        return f"{self._settings.address}:{self._settings.http_port}"

    @property
    def metrics_address(self) -> str:
        """host:port of the Prometheus metrics."""
        return f"{self._settings.address}:{self._settings.metrics_port}"

    @property
    def log(self) -> Path:
        """File for the output."""
        return self._log

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models for clients."""
        return self._settings.models

    @property
    def remarks(self) -> list[str]:
        """What a user has to know of how it is served; a line each."""
        if not self._entrance.is_direct:
            return []
        names = ", ".join(sorted(self._settings.aliases))
        known = f"; the earlier names of the models ({names}) answer over HTTP alone" if names else ""
        return [f"gRPC goes to Triton itself, which counts no request that a full queue refuses{known}"]

    def name_of(self, name: str) -> str:
        """Returns the current name of a model that clients may also call by an earlier one."""
        return self._settings.aliases.get(name, name)

    @property
    def deaths(self) -> int:
        """How often Triton or the front died within the last `WINDOW_SECONDS`."""
        return len(self._deaths)

    def __enter__(self) -> Self:
        """Starts Triton and the front; returns when every model is ready.

        Raises:
            InputError: A port is taken, or a key or the certificate is missing or wrong.
            ServerError: Triton or the front did not start.
        """
        self._entrance.check()
        check_ports(self._settings.address, self._ports)
        self._ending.clear()
        self._over.clear()
        self._folder = safe_folder()
        self._reaper = leftovers.reap(self._folder.name, self._folder, os.getpid())
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(b"")
            self._live = live = LiveRepository(self._folder / "live", self._repository, self._blobs, self._folders)
            self._settings = replace(self._settings, routes=str(live.routes_file), folder=str(live.folder), metrics=str(self._metrics_link))
            self._settings = self._towards_triton()
            self._spawn_front()  # it gets ready while Triton does
            self._start_triton()
            self._await_front()
            self._blobs.prune()
        except BaseException:
            self.stop()
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="triton supervisor", daemon=True)
        self._supervisor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stops both."""
        self.stop()

    def check_alive(self) -> None:
        """Raises `ServerError` if the service has ended, with the cause."""
        if self._failure is not None:
            raise ServerError(self._failure)

    def wait(self) -> None:
        """Blocks until the service ends because it died too often."""
        self._over.wait()

    def roll_over(self, model: str, source: Path, check: Check) -> Rolled:
        """Rolls a model over to another version, without a request that fails; see `triton_repo.roll_over`.

        Args:
            model: Its name.
            source: The folder of the model in another repository.
            check: Called with the address and the new version before requests go there; raises if its answers are wrong.

        Raises:
            InputError: There is no such model, or the new version is no replacement for it.
            ServerError: It was not loaded.
        """
        with self._changing:
            if self._triton is None or self._live is None or not self._triton.is_alive:
                raise ServerError("Triton does not run; try again when it has been started again")
            try:
                rolled = roll_over(self._triton, self._live, model, source, check)
            finally:
                self._blobs.prune()
            self._note(f"model {model} rolled over from version {rolled.before} to {rolled.after} in {rolled.seconds:.2f} s")
            return rolled

    def stop(self) -> None:
        """Stops front and server; does nothing if they do not run."""
        self._ending.set()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.join()
        front, self._front = self._front, None
        if front is not None:
            _end(front)
        triton, self._triton = self._triton, None
        if triton is not None:
            triton.stop()
        held, self._held = self._held, None
        if held is not None:
            held.close()
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.kill()
            reaper.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _grpc_link(self) -> Path:
        return self._folder / "grpc"

    @property
    def _metrics_link(self) -> Path:
        return self._folder / "metrics"

    def _towards_triton(self) -> Settings:
        """Returns the settings with the place where the front finds Triton at each start; holds the port if clients use it, too."""
        if not self._entrance.is_direct:
            return replace(self._settings, triton=f"unix:{self._grpc_link}")
        self._held = hold(self._settings.address, self._settings.grpc_port)
        port = int(self._held.getsockname()[1])
        return replace(self._settings, grpc_port=port, triton=f"{self._settings.address}:{port}")

    def _start_triton(self) -> None:
        assert self._live is not None, "made before"
        place = (self._settings.address, self._settings.grpc_port) if self._entrance.is_direct else None
        triton = TritonServer(
            self._live.folder,
            self._environment,
            self._log,
            models=self._live.names,
            private=place is None,
            place=place,
            traces=self._settings.traces,
        )
        self._triton = triton.__enter__()
        if place is None:
            _point(self._grpc_link, triton.grpc_socket)
        _point(self._metrics_link, triton.metrics_socket)

    def _replace_triton(self) -> None:
        """Starts Triton in place of one that died, or whose model did; what that one still answers it may, until the new one is ready.

        Where both would listen on one port it ends at once, because its answers would be taken for those of the new one.
        """
        before = self._triton
        assert before is not None, "it ran"
        before.terminate()
        if self._entrance.is_direct:
            before.kill()
        self._start_triton()
        before.kill()  # now, because the front keeps its connection as long as it lives

    def _spawn_front(self) -> None:
        """Starts the front; it says when it listens."""
        command = [sys.executable, "-m", "triton_repo.front.process", json.dumps(asdict(self._settings))]
        with self._log.open("ab") as output:
            variables = {**child_environment(), "GRPC_VERBOSITY": "NONE"}
            self._front = spawn(command, env=variables, group=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output)

    def _await_front(self) -> None:
        """Waits until the front listens, and takes the ports over.

        Raises:
            ServerError: It did not start.
        """
        assert self._front is not None, "started"
        assert self._front.stdout is not None, "a pipe"
        ready, _, _ = select.select([self._front.stdout], [], [], FRONT_SECONDS)
        line = self._front.stdout.readline() if ready else b""
        if not line.strip():
            _end(self._front)
            check_ports(self._settings.address, self._ports)  # somebody may have taken one since
            raise ServerError(f"the front of Triton did not start: {cause(self._front.returncode, self._end_of_log())}; log: {self._log}")
        self._settings = Settings(**json.loads(line))

    def _supervise(self) -> None:
        while not self._ending.wait(PERIOD_SECONDS):
            try:
                with self._changing:
                    if self._triton is not None and not self._triton.is_alive:
                        self._count(self._death())
                        self._replace_triton()
                if self._front is not None and self._front.poll() is not None:
                    self._count(f"the front of Triton exited: {cause(self._front.returncode, '')}")
                    self._spawn_front()
                    self._await_front()
            except (ServerError, OSError) as error:
                self._failure = str(error)
                self._note(f"the service ends: {error}")
                self._over.set()
                return

    def _death(self) -> str:
        """Returns why Triton died."""
        assert self._triton is not None, "it ran"
        try:
            self._triton.check_alive()
        except ServerError as error:
            return str(error)
        raise AssertionError("it is alive")

    def _count(self, death: str) -> None:
        """Records a death.

        Raises:
            ServerError: There were too many.
        """
        now = time.monotonic()
        self._deaths = [*(moment for moment in self._deaths if now - moment < WINDOW_SECONDS), now]
        if len(self._deaths) > RESTARTS:
            raise ServerError(f"{death}; it died {len(self._deaths)} times within {WINDOW_SECONDS:.0f} s and is not started again")
        self._note(f"{death}; it is started again ({len(self._deaths)} of {RESTARTS} times within {WINDOW_SECONDS:.0f} s)")

    def _note(self, line: str) -> None:
        with self._log.open("a", encoding="utf-8") as stream:
            stream.write(f"compress: {time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4096:]


def _point(link: Path, target: Path) -> None:
    """Atomically makes `link` lead to `target`."""
    temporary = link.with_name(f".{link.name}")
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    temporary.replace(link)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
