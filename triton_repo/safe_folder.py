"""Safe paths for the Triton server: a folder of our own whose path has only letters, digits and `._-/`.

Triton starts the process of a Python model through a shell, with the path of the model in the command, and splits some of its arguments at
commas and colons. A path with a space or with shell characters hangs it or runs what the path says. So the server never sees the path of a
run or of an environment, only links to them in this folder:

    /tmp/compress-triton-XXXXXXXX/   repository -> the model repository   environment, site, libraries -> the server environment
                                     backends/   grpc:1   metrics   admin its Python backend and its sockets
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from pathlib import Path

from foundation.core.errors import InputError
from triton_repo.environment import ServerEnvironment

_SAFE = re.compile(r"/[A-Za-z0-9._/-]{1,70}")
"""A Unix socket has room for 107 characters, 37 of them ours."""


def safe_folder() -> Path:
    """Creates an empty folder that only its owner may enter.

    Raises:
        InputError: No folder for temporary files has a safe path and can be written to.
    """
    tried = [tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    for parent in map(os.path.realpath, tried):
        if _SAFE.fullmatch(parent) and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix="compress-triton-", dir=parent))
    raise InputError(
        "TMPDIR",
        f"{', '.join(tried)} cannot be written to, or have a path with other characters than letters, digits and ._-",
        remedy="set it to a folder without these faults",
    )


def linked(folder: Path, repository: Path, environment: ServerEnvironment) -> tuple[Path, ServerEnvironment]:
    """Links a repository and a server environment in `folder`; returns both at their paths there."""
    names = {"repository": repository, "environment": environment.path, "site": environment.site, "libraries": environment.libraries}
    for name, target in names.items():
        (folder / name).symlink_to(target.absolute())
    there = dataclasses.replace(environment, path=folder / "environment", site=folder / "site", libraries=folder / "libraries")
    return folder / "repository", there
