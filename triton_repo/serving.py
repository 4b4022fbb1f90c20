"""Serves a model repository in the foreground. It imports nothing of the stage that writes one, so that a server is ready sooner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.core import otlp
from foundation.core.errors import InputError
from triton_repo import environment
from triton_repo.config import model_names
from triton_repo.entrance import Entrance
from triton_repo.gpu.plan_files import SPEC as GPU_SPEC
from triton_repo.ports import FREE, Ports
from triton_repo.served_models import ServedModel
from triton_repo.service import Service
from triton_repo.vllm import COMPOSE

ON_KERNELS = "_kernels"
"""Ending of the name of a repository for our own kernels."""


def server_of(
    repository: Path,
    log: Path,
    ports: Ports = FREE,
    models: Sequence[ServedModel] | None = None,
    entrance: Entrance | None = None,
    traces: str = "",
) -> Service:
    """Returns the service of a repository, a context manager that starts and stops it.

    Args:
        repository: The folder `model_repository`.
        log: File for the output of the server.
        ports: Ports of gRPC, HTTP and metrics; 0 takes a free one.
        models: The models to load; None: all, under the names of their folders.
        entrance: Where it listens, and what it asks of clients there; default: loopback, where it asks for nothing that is not set.
        traces: Address of a collector of OpenTelemetry for traces of requests (`traces_here`); empty: nothing is traced.

    Raises:
        InputError: The repository cannot be served here, lacks one of the models, or the server environment is missing.
    """
    kernels = repository.with_name(f"{repository.name}{ON_KERNELS}")
    if is_for_gpus(repository) or (not repository.exists() and kernels.exists()):
        there = repository if repository.exists() else kernels
        raise InputError(f"{there}", "this repository is for GPUs and is served in NVIDIA's container", remedy=f"see {there / 'README.md'}")
    if not model_names(repository):
        raise InputError(f"{repository}", "holds no model", remedy="give a model_repository folder that the triton_repo stage wrote")
    unknown = sorted({model.folder for model in models or ()} - set(model_names(repository)))
    if unknown:
        raise InputError(f"{repository}", f"has no {' and no '.join(unknown)}", f"it holds {', '.join(model_names(repository))}")
    return Service(repository, environment.check(), log, ports=ports, models=models, entrance=entrance, traces=traces)


def traces_here(say: Callable[[str], None]) -> str:
    """Returns the address of the collector of OpenTelemetry that the environment names; empty where it names none.

    Args:
        say: Prints the line that requests are traced, or why they are not: a machine may have the variable for other programs.

    Raises:
        InputError: The variables are wrong.
    """
    endpoint = otlp.endpoint()
    if endpoint is None:
        return ""
    if package := otlp.missing():
        say(f"warning: requests are not traced to {endpoint}: the package {package} is not installed; {otlp.INSTALL}")
        return ""
    say(f"traces of requests go to {endpoint}")
    return endpoint


def is_for_gpus(repository: Path) -> bool:
    """Whether a repository is served in a container of NVIDIA's."""
    return (repository / GPU_SPEC).exists() or (repository / COMPOSE).exists()


def serve(server: Service, say: Callable[[str], None]) -> None:
    """Serves in the foreground until interrupted.

    Args:
        server: From `server_of`.
        say: Prints one line for the user.

    Raises:
        ServerError: The server did not start, or died too often.
    """
    say(f"starting Triton with {', '.join(server.models)}; log: {server.log}")
    with server:
        places = f"gRPC {server.grpc_address}, HTTP {server.http_address}, metrics {server.metrics_address}"
        for remark in server.remarks:
            say(remark)
        say(f"ready: {', '.join(server.models)} at {places}; stop with Ctrl-C")
        try:
            server.wait()
        except KeyboardInterrupt:
            say("stopping")
            return
        server.check_alive()
