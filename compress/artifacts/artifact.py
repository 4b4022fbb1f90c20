"""Artifacts: folders that are written whole or not at all, and that know what they hold.

An artifact is a folder with `manifest.json`: its kind, the sha256 of every file, the cache key it was made for, the digests of its
parents, the resolved config, seed, versions, hardware, figures, wall time and peak memory. It is written into a temporary sibling,
fsynced and renamed, so that a reader sees a finished artifact or none. There is no pickle in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
MANIFEST = "manifest.json"
Kind = Literal["checkpoint", "evaluation", "engine", "latency", "model_repository"]


class DamagedArtifact(Exception):
    """An artifact is not what its manifest says; the message names the file."""


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its folder and its manifest."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Id of the stage that made it."""
        return str(self.manifest["id"])

    @property
    def kind(self) -> Kind:
        """What it holds."""
        kind: Kind = self.manifest["kind"]
        return kind

    @property
    def key(self) -> str:
        """Digest of everything that went in: the cache key."""
        return str(self.manifest["key"])

    @property
    def digest(self) -> str:
        """Digest of everything that came out: names and contents of all files."""
        return str(self.manifest["digest"])

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures its stage returned."""
        metrics: dict[str, Any] = self.manifest["metrics"]
        return metrics

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, the manifest excluded."""
        return sum(entry["size"] for entry in self.manifest["files"].values())


def lineage(name: str, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Returns which of `artifacts` one of them was made of, in the order of the mapping, which has parents first; itself is the last."""
    names = list(artifacts)
    line, parents = [name], artifacts[name].manifest["parents"]
    for earlier in reversed(names[: names.index(name)]):
        if artifacts[earlier].digest in parents:
            line.append(earlier)
            parents = artifacts[earlier].manifest["parents"]
    return line[::-1]


def digest(value: Any) -> str:
    """Returns the sha256 (hex) of a JSON value in canonical form: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the sha256 (hex) of the contents of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_below(folder: Path) -> dict[str, Path]:
    """Returns every file below `folder` except the manifest, by its relative posix name, sorted."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    files.pop(MANIFEST, None)
    return dict(sorted(files.items()))


@contextmanager
def writing(destination: Path) -> Iterator[Path]:
    """Gives an empty temporary sibling of `destination`; on a clean exit it is fsynced and renamed to `destination`.

    Whatever stood at `destination` is replaced. On an exception the temporary folder is removed and `destination` is untouched.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:8]}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            _fsync(path)
        _fsync(temporary)
        replaced = temporary.with_suffix(".old")
        if destination.exists():
            destination.rename(replaced)
        temporary.rename(destination)
        _fsync(destination.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` in one atomic step."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replaces the file at `path` by `value` as indented JSON, in one atomic step."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def seal(folder: Path, *, id: str, kind: Kind, key: str, parents: list[str], fields: Mapping[str, Any]) -> None:
    """Hashes every file in `folder` and writes its manifest; the last act before the folder is renamed.

    Args:
        folder: The temporary folder of `writing`.
        id: Id of the stage.
        kind: What the artifact holds.
        key: Cache key.
        parents: Digests of the artifacts it was made from.
        fields: `config`, `seed`, `versions`, `hardware`, `metrics`, `seconds`, `peak_memory_bytes`, ...
    """
    files = {name: {"sha256": file_digest(path), "size": path.stat().st_size} for name, path in files_below(folder).items()}
    manifest = {"schema": SCHEMA, "id": id, "kind": kind, "key": key, "parents": parents, "digest": digest(files), "files": files, **fields}
    write_json(folder / MANIFEST, manifest)


def load(folder: Path) -> Artifact:
    """Reads the manifest of the artifact in `folder`; hashes nothing.

    Raises:
        DamagedArtifact: There is no manifest that this version reads.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedArtifact(f"{folder / MANIFEST}: cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise DamagedArtifact(f"{folder / MANIFEST}: schema {SCHEMA} expected")
    return Artifact(folder, manifest)


def verify(artifact: Artifact) -> list[str]:
    """Hashes every file of the artifact again.

    Returns:
        One line for each file that is missing, added or changed; empty where all is well.
    """
    problems, present = [], files_below(artifact.path)
    for name, entry in artifact.manifest["files"].items():
        if name not in present:
            problems.append(f"{artifact.path / name}: missing")
        elif present[name].stat().st_size != entry["size"] or file_digest(present[name]) != entry["sha256"]:
            problems.append(f"{artifact.path / name}: contents differ from the manifest (sha256 {entry['sha256'][:12]} expected)")
    problems += [f"{artifact.path / name}: not in the manifest" for name in present.keys() - artifact.manifest["files"].keys()]
    if digest(artifact.manifest["files"]) != artifact.digest:
        problems.append(f"{artifact.path / MANIFEST}: digest does not match its list of files")
    return problems


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
