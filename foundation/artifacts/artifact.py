"""Artifacts: output folders of stages, written atomically and described by a manifest.

An artifact is a folder with a `manifest.json` that holds its kind, the sha256 of every file, its cache key, the digests of its parents,
the resolved config, seed, versions, hardware, metrics, wall time and peak memory, and the digest of all these. It is written to a
temporary folder next to its destination, fsynced and renamed, so a reader sees either the finished artifact or none. Artifacts contain no
pickles, and only files and folders: a link could lead to contents that nobody has hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from foundation.core.errors import InputError, Problem
from foundation.core.files import read_plain
from foundation.core.shown import reason, shown
from foundation.machine.faults import writing_to

SCHEMA = 1
MANIFEST = "manifest.json"
SEAL = "manifest_sha256"
"""Key of the digest of all other entries of a manifest; absent from manifests of earlier versions."""
MOST_JSON = 2**30
REPLACED = ".old"
"""End of the name of a folder while another one takes its place."""
Kind = Literal["checkpoint", "evaluation", "engine", "latency", "model_repository", "buckets", "cascade"]


class DamagedArtifact(Exception):
    """An artifact does not match its manifest.

    Args:
        key: The file.
        given: What is wrong with it.
    """

    def __init__(self, key: str, given: str) -> None:
        super().__init__(key, given)
        self.problem = Problem(key, given)

    def __str__(self) -> str:
        return str(self.problem)


class FileEntry(TypedDict):
    """A file of an artifact, in its manifest."""

    sha256: str
    size: int


class Manifest(TypedDict, total=False):
    """The contents of manifest.json, see above; what `ENTRIES` does not list is absent from manifests of earlier versions."""

    schema: int
    id: str
    kind: Kind
    key: str
    parents: list[str]
    digest: str
    files: dict[str, FileEntry]
    stage: str
    config: Mapping[str, object]
    seed: int
    versions: Mapping[str, str]
    hardware: Mapping[str, object]
    metrics: dict[str, Any]
    seconds: float
    peak_memory_bytes: int
    depends_on: Mapping[str, object]


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """Id of the stage that produced the artifact."""
        return self.manifest["id"]

    @property
    def kind(self) -> Kind:
        """What the artifact holds."""
        return self.manifest["kind"]

    @property
    def key(self) -> str:
        """Cache key: the digest of all inputs of the stage."""
        return self.manifest["key"]

    @property
    def digest(self) -> str:
        """Digest of all outputs of the stage: the names and contents of the files."""
        return self.manifest["digest"]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that the stage returned."""
        return self.manifest["metrics"]

    @property
    def size_bytes(self) -> int:
        """Total size of all files in bytes, without the manifest."""
        return sum(entry["size"] for entry in self.manifest["files"].values())


def lineage(name: str, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Returns the names of an artifact's ancestors, oldest first, followed by its own; `artifacts` must list parents before children."""
    names = list(artifacts)
    line, parents = [name], artifacts[name].manifest["parents"]
    for earlier in reversed(names[: names.index(name)]):
        if artifacts[earlier].digest in parents:
            line.append(earlier)
            parents = artifacts[earlier].manifest["parents"]
    return line[::-1]


def digest(value: object) -> str:
    """Returns the sha256 (hex) of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the sha256 (hex) of a file's contents."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_below(folder: Path) -> dict[str, Path]:
    """Returns all files below `folder` except the manifest, keyed and sorted by relative POSIX path; links are not followed."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if not p.is_symlink() and p.is_file()}
    files.pop(MANIFEST, None)
    return dict(sorted(files.items()))


def strangers_below(folder: Path) -> list[Problem]:
    """Returns a problem for each thing below `folder` (and for `folder`) that is neither a file nor a folder with contents."""
    problems = [Problem(f"{folder}", "is a link, not a folder")] if folder.is_symlink() else []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            problems.append(Problem(f"{path}", f"is a link to {os.readlink(path)}", "only files and folders belong there"))
        elif path.is_dir():
            problems += [] if any(path.iterdir()) else [Problem(f"{path}", "an empty folder, not in the manifest")]
        elif not path.is_file():
            problems.append(Problem(f"{path}", "is neither a file nor a folder"))
    return problems


@contextmanager
def writing(destination: Path) -> Iterator[Path]:
    """Yields an empty temporary folder next to `destination`; on a clean exit it is fsynced and renamed to `destination`.

    An existing `destination` is replaced. On an exception the temporary folder is removed and `destination` stays unchanged. A kill between
    the two renames of a replacement leaves nothing there: `put_back` repairs it.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:8]}.tmp"
    replaced = temporary.with_suffix(REPLACED)
    temporary.mkdir()
    try:
        with writing_to(temporary):
            yield temporary
        for path in temporary.rglob("*"):
            _fsync(path)
        _fsync(temporary)
        if destination.exists():
            destination.rename(replaced)
        temporary.rename(destination)
        _fsync(destination.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not destination.exists():
            replaced.rename(destination)
        raise


def put_back(destination: Path) -> None:
    """Renames the folder that a killed `writing` was about to replace to `destination` again, if nothing is there."""
    if not destination.exists():
        found = (path for path in destination.parent.glob("*") if path.name.startswith(f".{destination.name}.") and path.suffix == REPLACED)
        for replaced in found:
            replaced.rename(destination)
            return


def write_text(path: Path, text: str) -> None:
    """Writes the file at `path` atomically, replacing an existing one."""
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


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON to `path` atomically, replacing an existing file."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def seal(folder: Path, *, id: str, kind: Kind, key: str, parents: list[str], fields: Mapping[str, object]) -> None:
    """Hashes every file in `folder` and writes the manifest; the last step before `writing` renames the folder.

    Args:
        folder: The temporary folder from `writing`.
        id: Id of the stage.
        kind: What the artifact holds.
        key: Cache key.
        parents: Digests of the artifacts that the stage read.
        fields: Further manifest entries: `config`, `seed`, `versions`, `hardware`, `metrics`, `seconds`, `peak_memory_bytes`, ...

    Raises:
        ValueError: The folder holds something that cannot be hashed: a link, a socket, an empty folder.
    """
    strangers = strangers_below(folder)
    if strangers:
        raise ValueError(str(strangers[0]))
    files = {name: {"sha256": file_digest(path), "size": path.stat().st_size} for name, path in files_below(folder).items()}
    manifest = {"schema": SCHEMA, "id": id, "kind": kind, "key": key, "parents": parents, "digest": digest(files), "files": files, **fields}
    write_json(folder / MANIFEST, {**manifest, SEAL: _sealed(manifest)})


def _sealed(manifest: Mapping[str, object]) -> str:
    return digest(json.loads(json.dumps({name: value for name, value in manifest.items() if name != SEAL}, allow_nan=False)))


def read_json(path: Path) -> Any:
    """Returns the contents of a JSON file of an artifact.

    Raises:
        DamagedArtifact: The file is missing or unreadable.
    """
    try:
        return json.loads(read_plain(path, MOST_JSON).decode("utf-8"))
    except InputError as error:
        raise DamagedArtifact(error.problems[0].key, error.problems[0].given) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedArtifact(f"{path}", f"cannot be read ({reason(error)})") from error


def load(folder: Path) -> Artifact:
    """Reads the manifest of the artifact in `folder`, without hashing its files.

    Raises:
        DamagedArtifact: The manifest is missing, unreadable, of another schema version, or was changed.
    """
    manifest: Manifest = read_json(folder / MANIFEST)
    entries: Mapping[str, object] = manifest
    if not isinstance(entries, dict) or entries.get("schema") != SCHEMA:
        raise DamagedArtifact(f"{folder / MANIFEST}", f"schema {SCHEMA} expected")
    for name, fits in ENTRIES.items():
        if name not in entries or not fits(entries[name]):
            raise DamagedArtifact(f"{folder / MANIFEST}", f"{name}: {shown(entries.get(name))} is no such entry of a manifest")
    try:
        intact = SEAL not in entries or entries[SEAL] == _sealed(entries)
    except ValueError:  # NaN, or an integer too long to write
        intact = False
    if not intact:
        raise DamagedArtifact(f"{folder / MANIFEST}", f"its contents differ from its own digest ({SEAL})")
    return Artifact(folder, manifest)


def _is_file_list(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and type(entry.get("size")) is int for entry in value.values()
    )


ENTRIES: Mapping[str, Callable[[object], bool]] = {
    "id": lambda value: isinstance(value, str),
    "kind": lambda value: value in get_args(Kind),
    "key": lambda value: isinstance(value, str),
    "digest": lambda value: isinstance(value, str),
    "parents": lambda value: isinstance(value, list) and all(isinstance(parent, str) for parent in value),
    "files": _is_file_list,
}
"""Keys of every manifest, with a check of their values."""


def verify(artifact: Artifact) -> list[Problem]:
    """Hashes every file of the artifact again and compares with the manifest.

    Returns:
        A problem for each file that is missing, added or changed, and for each link, socket or empty folder; empty if the artifact is
        intact.
    """
    problems, present = strangers_below(artifact.path), files_below(artifact.path)
    for name, entry in artifact.manifest["files"].items():
        if name not in present:
            problems.append(Problem(f"{artifact.path / name}", "missing"))
        elif present[name].stat().st_size != entry["size"] or file_digest(present[name]) != entry["sha256"]:
            problems.append(
                Problem(f"{artifact.path / name}", f"contents differ from the manifest (sha256 {entry['sha256'][:12]} expected)")
            )
    problems += [Problem(f"{artifact.path / name}", "not in the manifest") for name in present.keys() - artifact.manifest["files"].keys()]
    if digest(artifact.manifest["files"]) != artifact.digest:
        problems.append(Problem(f"{artifact.path / MANIFEST}", "digest does not match its list of files"))
    return problems


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
