"""Compiled networks of OpenVINO, kept between two starts of a server.

    <cache folder>/blobs/<key>/  *.network        key: sha256 of all files of a version, the server's packages and the processor

The engine of the model writes, checks and reads them (`triton_repo.cpu_engines.openvino`), each whole or not at all. So any number of
servers use a folder at a time. A network has the size of the weights; the folders used longest ago are deleted once all together take more
than `MOST_BYTES`. What a server has read then stays readable to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from foundation.artifacts.artifact import file_digest
from foundation.machine.environment import cache_folder, hardware

MOST_BYTES = 8 * 2**30
SCHEMA = 2
CPU = ("cpu", "cpu_features")


class BlobCache:
    """The compiled networks of one server.

    Args:
        versions: Versions of the server's packages.
        root: Folder of all networks; default: in the cache folder.
    """

    def __init__(self, versions: Mapping[str, str], root: Path | None = None) -> None:
        self._root = cache_folder() / "blobs" if root is None else root
        facts: Mapping[str, object] = hardware()
        self._machine = {"versions": dict(versions), "hardware": {name: facts[name] for name in CPU}, "schema": SCHEMA}
        self._used: set[Path] = set()

    def open(self, version: Path) -> Path:
        """Returns the folder for the networks of a version.

        Args:
            version: Folder of the version: all its files count.
        """
        folder = self._root / self._key(version)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(folder)
        self._used.add(folder)
        return folder

    def prune(self) -> None:
        """Deletes what was used longest ago, by whatever server, but nothing of this one."""
        prune(self._root, MOST_BYTES, self._used)

    def _key(self, version: Path) -> str:
        files = {str(path.relative_to(version)): file_digest(path) for path in sorted(version.rglob("*")) if path.is_file()}
        return hashlib.sha256(json.dumps([self._machine, files], sort_keys=True).encode()).hexdigest()[:24]


def prune(root: Path, most_bytes: int, in_use: set[Path]) -> None:
    """Deletes the folders that were used longest ago, until the others take at most `most_bytes`.

    Args:
        root: Folder of all networks.
        most_bytes: Bytes that may stay.
        in_use: Folders that stay in any case.
    """
    if not root.is_dir():  # no server on this machine has kept a network yet
        return
    folders = sorted(((path.stat().st_mtime, path) for path in root.iterdir() if path.is_dir()), reverse=True)
    total = 0
    for _, folder in folders:
        total += _size(folder)
        if total > most_bytes and folder not in in_use:
            shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Returns the bytes of the files in a folder; other servers write and delete meanwhile."""
    sizes = 0
    for path in folder.glob("*"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:
            continue
    return sizes
