"""The packages of the Python models of a GPU repository, as wheels in the deployed folder: its containers need no network.

    requirements.txt (exact versions, sha256) -> pip download -> cache -> DIR/model_repository*/wheels/

They are fetched once, into `$XDG_CACHE_HOME/compress/wheels-<first 12 digits of the sha256 of the requirements>-<Python>`. Where there is
no package index, `$COMPRESS_WHEELS` names a folder with the files; the hashes are checked all the same.

Not supported: containers on arm64, and images whose Python is not 3.12.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from foundation.core.errors import InputError
from foundation.machine.environment import cache_folder

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
VARIABLE = "COMPRESS_WHEELS"
FOLDER = "wheels"
PYTHON = "3.12"
"""Python of NVIDIA's images, from release 24.10 on."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MAX_SECONDS = 600.0


def vendor(out: Path, python: str = PYTHON) -> list[Path]:
    """Copies the wheels into a folder, fetching them first where they are not in the cache; returns the copies.

    Args:
        out: Folder to write into; created.
        python: Python version of the container, as major.minor.

    Raises:
        InputError: They cannot be fetched.
    """
    out.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(wheel, out)) for wheel in sorted(_cached(python).glob("*.whl"))]


def _cached(python: str) -> Path:
    """Returns the folder of the cache with all wheels."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"{FOLDER}-{digest}-{python}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            whole = Path(temporary) / FOLDER
            _download(whole, python)
            if not folder.is_dir():  # another process may have been first
                whole.rename(folder)
    except OSError as error:
        raise InputError(
            f"{folder.parent}", f"the wheels for the container cannot be kept ({error})", remedy="set $XDG_CACHE_HOME"
        ) from error
    return folder


def _download(out: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(out)]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    given = os.environ.get(VARIABLE)
    if given:
        command += ["--no-index", "--find-links", given]
    try:
        done = subprocess.run(
            [*command, "--requirement", str(REQUIREMENTS)], capture_output=True, text=True, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InputError("wheels", f"those for the container were not fetched within {MAX_SECONDS:.0f} s", remedy="try again") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = ([line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"])[-1][:300]
        raise InputError(
            "wheels",
            f"numpy, pillow and tokenizers cannot be fetched for the container: {told}",
            remedy=(
                f"deploy where there is an index, or name a folder that holds them with ${VARIABLE}; {REQUIREMENTS} lists the versions"
            ),
        )
