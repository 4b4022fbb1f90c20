"""Compiled networks of OpenVINO, kept between two starts of a server.

    <cache folder>/blobs/<key>/  *.blob  blobs.json        key: sha256 of all files of a version, the server's packages and the processor

OpenVINO writes and reads the blobs itself (CACHE_DIR). It does not notice when the bytes of one have changed, and would answer wrongly; so
`blobs.json` holds their sha256, written once the server is ready. Blobs that are not listed, or have changed, are deleted before the start,
and compiled again. A blob has the size of the weights; the folders used longest ago are deleted once all together take more than
`MOST_BYTES`.

A folder belongs to one start at a time, from `open` to `seal`. Another start meanwhile compiles without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from compress.artifacts.artifact import file_digest, write_json
from compress.machine.environment import cache_folder, hardware

MANIFEST, LOCK = "blobs.json", ".lock"
MOST_BYTES = 8 * 2**30
SCHEMA = 1
CPU = ("cpu", "cpu_features")


class BlobCache:
    """The blobs of one server.

    Args:
        versions: Versions of the server's packages.
        root: Folder of all blobs; default: in the cache folder.
    """

    def __init__(self, versions: Mapping[str, str], root: Path | None = None) -> None:
        self._root = cache_folder() / "blobs" if root is None else root
        self._machine = {"versions": dict(versions), "hardware": {name: hardware()[name] for name in CPU}, "schema": SCHEMA}
        self._opened: dict[Path, IO[str]] = {}

    def open(self, version: Path) -> Path | None:
        """Returns the folder for the blobs of a version, with blobs that are whole or none; None where another start holds it.

        Args:
            version: Folder of the version: all its files count.
        """
        folder = self._root / self._key(version)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder in self._opened:
            return folder
        lock = (folder / LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        if not _whole(folder):
            for path in folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
        self._opened[folder] = lock
        return folder

    def seal(self) -> None:
        """Notes what the blobs are, once the models are ready, and lets others have the folders."""
        for folder, lock in self._opened.items():
            if not _whole(folder):
                write_json(folder / MANIFEST, {path.name: file_digest(path) for path in sorted(folder.glob("*.blob"))})
            os.utime(folder)
            lock.close()
        used, self._opened = set(self._opened), {}
        prune(self._root, MOST_BYTES, used)

    def _key(self, version: Path) -> str:
        files = {str(path.relative_to(version)): file_digest(path) for path in sorted(version.rglob("*")) if path.is_file()}
        return hashlib.sha256(json.dumps([self._machine, files], sort_keys=True).encode()).hexdigest()[:24]


def prune(root: Path, most_bytes: int, kept: set[Path]) -> None:
    """Deletes the folders that were used longest ago, until the others take at most `most_bytes`.

    Args:
        root: Folder of all blobs.
        most_bytes: Bytes that may stay.
        kept: Folders that stay in any case.
    """
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for folder in folders:
        total += sum(path.stat().st_size for path in folder.iterdir())
        if total > most_bytes and folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _whole(folder: Path) -> bool:
    """Whether the blobs of a folder are those that were noted."""
    try:
        noted = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(noted == {path.name: file_digest(path) for path in folder.glob("*.blob")})
    except (OSError, ValueError):
        return False
