"""What takes long and is made of sources and libraries alone is kept for later test runs: graphs that were traced, compiled kernels.

Its folder lies in the user's cache and is named after the versions of the libraries and the bytes of the sources: another version, or a
change to what traces or compiles, makes everything anew. `ANEW=1 make test` keeps nothing, as `.ci/run` does. What no run has read for
`DAYS` is removed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from foundation.machine.environment import cache_folder

ROOT = Path(__file__).resolve().parent.parent
DAYS = 14
CACHE = cache_folder() / "tests"
"""Read before the tests get a cache folder of their own."""


def cached_folder(name: str, libraries: Iterable[str], sources: Iterable[str], cache: Path = CACHE) -> Path | None:
    """Returns the folder of one kind of content; None where everything is to be made anew.

    Args:
        name: Of the kind.
        libraries: Distributions whose versions decide about the content.
        sources: Files and folders of this project that do, relative to its root.
        cache: Where such folders lie.
    """
    if os.environ.get("ANEW"):
        return None
    sources_digest = hashlib.sha256(platform.python_version().encode())
    sources_digest.update(repr([(one, _version(one)) for one in libraries]).encode())
    for file in sorted(file for source in sources for file in _files(ROOT / source)):
        sources_digest.update(f"{file.relative_to(ROOT)}\n".encode())
        sources_digest.update(file.read_bytes())
    folder = cache / f"{name}-{sources_digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in cache.iterdir():
        if time.time() - other.stat().st_mtime > DAYS * 86400:
            shutil.rmtree(other, ignore_errors=True)  # another run may remove it, too
    return folder


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))
