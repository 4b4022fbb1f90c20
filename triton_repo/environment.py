"""The virtual environment of the Triton server: its location, its checks and its installation.

`nvidia-pytriton` on PyPI contains a real tritonserver with the Python backend. That backend is built against numpy 1: with numpy 2 it
returns empty numeric outputs and crashes on a string output. So the server has its own environment, pinned by server-requirements.txt:

    $COMPRESS_SERVER_ENV, else $XDG_CACHE_HOME (or ~/.cache) /compress/server-<first 12 digits of the sha256 of the requirements>

`server-additions.txt` pins what single features of a served model need besides. It is no part of that name, so that an environment and the
cached results of a run outlive it: `build` adds it to an environment that is there, and a feature without its package is refused.

A virtual environment contains its own path and cannot be moved into place; instead a marker file, written last, marks it complete.

Not supported: systems other than Linux on x86-64 or arm64 with glibc 2.35 or newer, and Python below 3.8 or above 3.13.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import MetadataPathFinder, distributions
from pathlib import Path

from foundation.artifacts.artifact import write_text
from foundation.core.errors import InputError
from foundation.machine.environment import cache_folder

VARIABLE = "COMPRESS_SERVER_ENV"
REQUIREMENTS = Path(__file__).with_name("server-requirements.txt")
ADDITIONS = Path(__file__).with_name("server-additions.txt")
MARKER = "compress-server.txt"
FIX = "run `compress doctor --fix`"
MAX_SECONDS = 1800.0
_OFFLINE = re.compile(
    "Failed to establish a new connection|NameResolutionError|Temporary failure in name resolution|Cannot connect to proxy"
)
_REMEDIES = {
    "no connection to the package index": f"connect this machine, or set $PIP_INDEX_URL to a mirror or ${VARIABLE} to an environment",
    "No space left on device|Disk quota exceeded": "it takes 1 GB: free some space, or set $XDG_CACHE_HOME to another disk",
    "Permission denied|Read-only file system": "make that folder writable, or set $XDG_CACHE_HOME to one that is",
}
"""Remedies for a failed build, by words of its cause."""

# Runs in the interpreter of the environment: imports what the served models import, and prints the paths of the server's files.
_LOOK = """
import importlib.metadata, json, os, sys, sysconfig
sys.modules["openvino_telemetry"], os.environ["ORT_DISABLE_TELEMETRY"] = None, "1"
import jinja2, numpy, onnxruntime, openvino, PIL, soundfile, soxr, tokenizers
site = importlib.metadata.distribution("nvidia-pytriton").locate_file("")
names = ("nvidia-pytriton", "numpy", "onnxruntime", "openvino", "tokenizers", "pillow", "soundfile", "soxr")
print("FOUND" + json.dumps({
    "site": os.fspath(site), "python": "%d.%d" % sys.version_info[:2], "libraries": sysconfig.get_config_var("LIBDIR") or "",
    "versions": {name: importlib.metadata.version(name) for name in names}}))
"""


@dataclass(frozen=True)
class ServerEnvironment:
    """A working server environment."""

    path: Path
    """The virtual environment."""
    python: str
    """Python version of the environment, as major.minor."""
    site: Path
    """Its site-packages folder."""
    libraries: Path
    """Folder of the shared libpython."""
    versions: Mapping[str, str]
    """Versions of the packages of the server and its models."""

    def __str__(self) -> str:
        return f"{self.path} (nvidia-pytriton {self.versions['nvidia-pytriton']}, openvino {self.versions['openvino']})"

    @property
    def binary(self) -> Path:
        """The tritonserver executable."""
        return self.site / "pytriton" / "tritonserver" / "bin" / "tritonserver"

    @property
    def backend_files(self) -> tuple[Path, ...]:
        """The files of the Python backend."""
        server = self.site / "pytriton" / "tritonserver"
        backend = server / "backends" / "python"
        stub = server / "python_backend_stubs" / self.python / "triton_python_backend_stub"
        return backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the server: its shared libraries, and its interpreter first in PATH, where the backend looks for it."""
        libraries = f"{self.site / 'nvidia_pytriton.libs'}:{self.libraries}"
        return {"LD_LIBRARY_PATH": libraries, "PATH": f"{self.path / 'bin'}:{os.environ.get('PATH', os.defpath)}"}


def lock_digest() -> str:
    """Returns the sha256 (hex) of the requirements, which is part of the cache key of the stage."""
    return hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()


def location() -> Path:
    """Returns the path of the environment, whether it exists or not."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    return cache_folder() / f"server-{lock_digest()[:12]}"


def check() -> ServerEnvironment:
    """Returns the server environment after checking all its parts; the result is cached within a process.

    Raises:
        InputError: The environment is missing or does not work; the message says what to do.
    """
    path = location()
    given = bool(os.environ.get(VARIABLE))
    cure = f"correct or unset ${VARIABLE}, then {FIX}" if given else FIX
    python = path / "bin" / "python3"
    if not python.exists():
        raise InputError("server environment", f"{path} has no bin/python3", "triton_repo needs it to start Triton", cure)
    if not given and not _is_whole(path):
        raise InputError("server environment", f"{path} is incomplete or was built from other requirements", remedy=cure)
    try:
        return _look(path, python.stat().st_mtime_ns)
    except _Broken as error:
        raise InputError("server environment", f"{path} does not work: {error}", remedy=cure) from error


def build() -> ServerEnvironment:
    """Builds the environment if it is missing or broken, or waits for another process that is building it.

    Raises:
        InputError: The environment cannot be built; the message quotes the reason.
    """
    if os.environ.get(VARIABLE):  # an environment given by the user is never changed
        return check()
    path = location()
    with _building(path):
        try:
            found = check()
        except InputError:
            _install(path)
            found = check()
        _add(found)
        return found


def additions(found: ServerEnvironment) -> dict[str, str | None]:
    """Returns the versions of the additions in an environment by package; None for one that is missing."""
    site = [str(found.site)]
    MetadataPathFinder().invalidate_caches()  # they go by the time of the folder, which pip may have changed within one step of the clock
    return {name: next((entry.version for entry in distributions(name=name, path=site)), None) for name in _pinned()}


def cure(name: str) -> str:
    """Returns what installs a missing addition: an environment that the user gave is never changed."""
    return f"pip install {name} into ${VARIABLE}" if os.environ.get(VARIABLE) else FIX


class _Broken(Exception):
    """The environment does not work; a one-line message."""


@functools.lru_cache(maxsize=4)
def _look(path: Path, _changed: int) -> ServerEnvironment:
    """Imports the packages and checks with ldd that the server finds its libraries."""
    python = path / "bin" / "python3"
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    output = _run([str(python), "-c", _LOOK], variables)
    found = json.loads(output.split("FOUND", 1)[1])
    result = ServerEnvironment(path, found["python"], Path(found["site"]), Path(found["libraries"]), found["versions"])
    if int(result.versions["numpy"].split(".")[0]) >= 2:
        raise _Broken(f"numpy {result.versions['numpy']} is installed; the Python backend needs numpy below 2")
    for file in (result.binary, *result.backend_files):
        if not file.exists():
            raise _Broken(f"{file} is missing (Python {result.python}; the backend supports 3.8 to 3.13)")
    # ldd finds a glibc that is too old, and a Python without a shared library
    linked = _run(["ldd", *map(str, (result.binary, result.backend_files[0], result.backend_files[-1]))], {**variables, **result.variables})
    missing = [" ".join(line.split()) for line in linked.splitlines() if "not found" in line]
    if missing:
        raise _Broken(f"{missing[0]}; glibc 2.35 or newer and a Python with a shared libpython are needed")
    return result


def _install(path: Path) -> None:
    """Creates the virtual environment from scratch and marks it complete."""
    try:
        shutil.rmtree(path, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(path)])
        _run([*_pip(path), "--requirement", str(REQUIREMENTS)])
        write_text(path / MARKER, lock_digest() + "\n")
    except (_Broken, OSError) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise InputError("server environment", f"{path} cannot be built: {error}", remedy=_remedy(str(error))) from error


def _pinned() -> dict[str, str]:
    """Returns the pinned versions of the additions by package."""
    lines = (line.partition("#")[0].strip() for line in ADDITIONS.read_text(encoding="utf-8").splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if line)}


def _add(found: ServerEnvironment) -> None:
    """Installs the additions into an environment that works, unless it has them.

    Raises:
        InputError: They cannot be installed.
    """
    if additions(found) == _pinned():
        return
    try:
        _run([*_pip(found.path), "--no-deps", "--requirement", str(ADDITIONS)])
    except (_Broken, OSError) as error:
        raise InputError(
            "server environment", f"{found.path}: additions cannot be installed: {error}", remedy=_remedy(str(error))
        ) from error


def _pip(path: Path) -> list[str]:
    return [str(path / "bin" / "python3"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]


def _remedy(cause: str) -> str:
    """Returns the remedy for a failed build."""
    known = next((remedy for words, remedy in _REMEDIES.items() if re.search(words, cause)), None)
    if known is not None:
        return known
    return (
        "it needs a package index, Python 3.11 or 3.12 with venv, and 1 GB of disk "
        f"(set $XDG_CACHE_HOME to move it, or ${VARIABLE} to use an existing one)"
    )


def _is_whole(path: Path) -> bool:
    try:
        return (path / MARKER).read_text(encoding="utf-8").strip() == lock_digest()
    except OSError:
        return False


@contextmanager
def _building(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise InputError("server environment", f"{path.parent} is not writable ({error.strerror})", remedy="set $XDG_CACHE_HOME") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command; on failure raises `_Broken` with its last error line."""
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", timeout=MAX_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _Broken(f"{Path(command[0]).name} took more than {MAX_SECONDS:.0f} s") from error
    except OSError as error:
        raise _Broken(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        if any(_OFFLINE.search(line) for line in lines):  # pip then says that there is no such package
            raise _Broken("no connection to the package index")
        errors = [line for line in lines if line.startswith("ERROR")]
        raise _Broken((errors or lines or [f"{command[0]} exited with status {done.returncode}"])[-1][:300])
    return done.stdout
