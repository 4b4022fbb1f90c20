"""The containers of `make gpu-check`: both images of a deployed repository, its plans, and a server on some or all GPUs.

    build   docker build --network none, the wheels lie in the repository
    plans   docker run --gpus all --network none builder -> plans.json
    serve   docker run --gpus all | device=0, gRPC on a free port of loopback; stopped in any case

Every command goes through `Run`, so that tests play Docker.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foundation.core.errors import InputError
from triton_repo.deployment import DOCKER
from triton_repo.gpu.plan_files import RECORD

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; raises `InputError` with its last line where it fails."""
BUILDER, SERVER = "compress-gpu-check-builder", "compress-gpu-check-server"
READY_SECONDS = 600.0
HINT = "see docs/how-to/check-gpus.md"


def command(words: Sequence[str]) -> str:
    """Runs a command; its output is returned and not shown.

    Raises:
        InputError: It fails; the line quotes the last of its output.
    """
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise InputError(" ".join(words[:3]), f"ended with status {done.returncode}: {(lines or ['no output'])[-1][:300]}")
    return done.stdout


def machine(run: Run = command, which: Callable[[str], str | None] = shutil.which) -> dict[str, Any]:
    """Returns `gpus` (names) and `driver` of this machine, after checking that Docker can use them.

    Raises:
        InputError: There is no NVIDIA GPU, or no Docker that works; one line.
    """
    if which("nvidia-smi") is None:
        raise InputError("gpu-check", "this machine has no NVIDIA GPU (nvidia-smi is not there)", remedy=f"run it on one that has; {HINT}")
    listed = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).strip().splitlines()
    if not listed:
        raise InputError("gpu-check", "nvidia-smi lists no GPU", remedy=f"check the driver; {HINT}")
    if which("docker") is None:
        raise InputError("gpu-check", "Docker is not installed", remedy=f"install it, and NVIDIA's container toolkit; {HINT}")
    try:
        runtimes = run(["docker", "info", "--format", "{{json .Runtimes}}"])
    except InputError as error:
        raise InputError("gpu-check", f"Docker does not answer ({error})", remedy=f"start it, or join the group docker; {HINT}") from error
    if "nvidia" not in runtimes:
        raise InputError("gpu-check", "Docker has no runtime nvidia", remedy=f"install NVIDIA's container toolkit; {HINT}")
    names = [line.split(",")[0].strip() for line in listed]
    return {"gpus": names, "driver": listed[0].split(",")[1].strip()}


def build(deployed: Path, repository: Path, release: str, run: Run = command) -> None:
    """Builds both images.

    Args:
        deployed: What `compress deploy` wrote.
        repository: The repository for GPUs in it.
        release: Release of NVIDIA's images.
        run: Runs a command.
    """
    for target, tag in (("builder", BUILDER), ("server", SERVER)):
        words = ["docker", "build", "--network", "none", "--target", target, "--build-arg", f"RELEASE={release}", "--tag", tag]
        run([*words, "--file", str(deployed / DOCKER / "Dockerfile"), str(repository)])


def plans(repository: Path, run: Run = command) -> dict[str, Any]:
    """Builds, checks and times the plans; returns the contents of plans.json.

    Raises:
        InputError: They are not ready; the line says why.
    """
    volume = f"{repository.resolve()}:/repository"
    run(["docker", "run", "--rm", "--gpus", "all", "--network", "none", "--volume", volume, BUILDER])
    record: dict[str, Any] = json.loads((repository / RECORD).read_text(encoding="utf-8"))
    return record


@contextmanager
def serving(repository: Path, gpus: str, run: Run = command, ready: Callable[[str], bool] | None = None) -> Iterator[str]:
    """Serves the repository, and yields the address of gRPC once every model is ready.

    Args:
        repository: The repository, with plans.
        gpus: all, or device=N.
        run: Runs a command.
        ready: Whether the server at an address is ready; default: it is asked.

    Raises:
        InputError: It was not ready in time, or has ended.
    """
    volume = f"{(repository / 'models').resolve()}:/models:ro"
    words = ["docker", "run", "--detach", "--rm", "--gpus", gpus, "--shm-size", "1g", "--publish", "127.0.0.1::8001", "--volume", volume]
    name = run([*words, SERVER]).strip()
    try:
        address = run(["docker", "port", name, "8001/tcp"]).strip().splitlines()[0]
        deadline = time.monotonic() + READY_SECONDS
        while not (ready or _ready)(address):
            if time.monotonic() > deadline:
                last = run(["docker", "logs", "--tail", "3", name]).strip().replace("\n", " ")
                raise InputError("Triton in the container", f"not ready within {READY_SECONDS:.0f} s: {last[-300:]}")
            run(["docker", "inspect", "--format", "{{.State.Running}}", name])  # raises once it has ended
            time.sleep(1)
        yield address
    finally:
        run(["docker", "stop", name])


def _ready(address: str) -> bool:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(address) as client:
        try:
            return bool(client.is_server_ready(client_timeout=5))
        except InferenceServerException:  # not listening yet
            return False
