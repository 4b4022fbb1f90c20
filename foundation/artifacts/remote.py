"""A store of artifacts that machines share, at any URL of fsspec, such as s3://, gs:// and file://.

    compress-store.json       the schema of the store
    blobs/ab/abcd...          the contents of a file, named by its sha256
    artifacts/KEY.json        the manifest of an artifact, named by its cache key

All blobs of an artifact are written before its manifest, so whoever finds a manifest finds a whole artifact. A blob never changes. Two
machines that write one key at a time write the same blobs, or different ones; the manifest that is written last counts, and is whole. An
object of S3, Google Cloud and Azure appears when its upload is complete. Elsewhere a file is written under another name, and renamed.

Every byte is hashed on its way in. A blob that a lifecycle rule of the provider has removed makes the artifact absent, not damaged.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from foundation.artifacts import artifact
from foundation.artifacts.artifact import MANIFEST, SEAL, Artifact, DamagedArtifact, FileEntry, Kind
from foundation.core.errors import InputError
from foundation.core.progress import Progress
from foundation.core.shown import reason, without_credentials

SCHEMA, MARK = 1, "compress-store.json"
MOST_MANIFEST = 2**28
"""Bytes of a manifest."""
CHUNK, MEGABYTE = 2**22, 10**6
WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols whose objects appear when they are complete."""
LIBRARIES = frozenset({"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs"})
"""Packages whose exceptions say that a store fails."""
SHA256 = re.compile("[0-9a-f]{64}")
LONGEST_NAME = 255


class StoreFailure(Exception):
    """The store does not answer or refuses; `str(failure)` is why."""


class FileSystem(Protocol):
    """The part of `fsspec.AbstractFileSystem` that is used."""

    def info(self, path: str) -> Mapping[str, int]:
        """Returns the `size` of a file, among others.

        Raises:
            FileNotFoundError: It does not exist.
        """

    def open(self, path: str, mode: str) -> BinaryIO:
        """Opens a file."""

    def put_file(self, lpath: str, rpath: str, callback: object) -> None:
        """Uploads a file."""

    def makedirs(self, path: str, exist_ok: bool) -> None:
        """Creates a folder and those above it."""

    def mv(self, path1: str, path2: str) -> None:
        """Renames a file."""


class RemoteStore:
    """A store. Its methods raise `StoreFailure` where it does not answer or refuses.

    Args:
        url: Its URL, without credentials.
        files: The file system.
        root: The folder of the store in it.
        whole: Whether an uploaded file appears when it is complete; otherwise it is uploaded under another name, and renamed.
    """

    def __init__(self, url: str, files: FileSystem, root: str, whole: bool) -> None:
        self.url = url
        self._files, self._root, self._whole = files, root.rstrip("/"), whole

    def begin(self, create: bool) -> bool:
        """Reads the schema of the store; returns whether there is one.

        Args:
            create: Write the schema of a new store.

        Raises:
            InputError: A later version of compress has made the store, or something else is there.
        """
        text = self._read(MARK, MEGABYTE)
        if text is None and create:
            self._write(MARK, json.dumps({"schema": SCHEMA}))
        if text is not None and text.strip() != json.dumps({"schema": SCHEMA}).encode():
            raise InputError("store", f"{self.url}/{MARK} is not of schema {SCHEMA}", remedy="give another store")
        return text is not None

    def has(self, key: str) -> bool:
        """Whether the store has an artifact with this cache key."""
        return self._size(_place(key)) is not None

    def fetch(self, key: str, destination: Path, id: str, kind: Kind, progress: Progress) -> Artifact | None:
        """Downloads an artifact; the folder appears when every byte was hashed, and stays as it was if anything fails.

        Args:
            key: Cache key.
            destination: The folder.
            id: Id of its stage.
            kind: What the artifact holds.
            progress: Shows how far it is.

        Returns:
            The artifact; None if the store does not have it, or no longer all of its files.

        Raises:
            InputError: The store holds other contents than it says.
        """
        text = self._read(_place(key), MOST_MANIFEST)
        if text is None:
            return None
        try:
            with artifact.writing(destination) as temporary:
                (temporary / MANIFEST).write_bytes(text)
                files = self._files_of(temporary, key, id, kind)
                with progress.bar(f"fetch {id}, MB", _megabytes(files)) as advance:
                    self._download(temporary, files, _moved(advance))
        except _Absent:
            return None
        return artifact.load(destination)

    def look(self, key: str, folder: Path, id: str, kind: Kind) -> Artifact | None:
        """Downloads the manifest of an artifact that `fetch` would download.

        Args:
            key: Cache key.
            folder: A folder that does not exist; the manifest is written to it.
            id: Id of its stage.
            kind: What the artifact holds.

        Returns:
            The artifact, without its files (`take` downloads some); None if the store does not have it, or no longer all of its files.

        Raises:
            InputError: The store holds other contents than it says.
        """
        text = self._read(_place(key), MOST_MANIFEST)
        if text is None:
            return None
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(text)
        files = self._files_of(folder, key, id, kind)
        if any(self._size(_blob(entry)) is None for entry in files.values()):
            return None
        return artifact.load(folder)

    def take(self, found: Artifact, names: Iterable[str]) -> None:
        """Downloads some files of an artifact that `look` has returned, into its folder; names that it does not list are left out.

        Raises:
            InputError: The store holds other contents than it says, or has just lost a file.
        """
        files = found.manifest["files"]
        try:
            self._download(found.path, {name: files[name] for name in names if name in files}, lambda count: None)
        except _Absent as error:
            raise self._damaged(f"{self.url}/{_place(found.key)}", "a file has just been removed") from error

    def upload(self, made: Artifact, replace: bool, progress: Progress) -> bool:
        """Uploads an artifact, files that the store lacks first, its manifest last.

        Args:
            made: The artifact; its files have the hashes of its manifest.
            replace: Whether it takes the place of one with the same cache key.
            progress: Shows how far it is.

        Returns:
            Whether it was uploaded; False if the store has one already.
        """
        if not replace and self.has(made.key):
            return False
        files = made.manifest["files"]
        with progress.bar(f"upload {made.id}, MB", _megabytes(files)) as advance:
            moved = _moved(advance)
            for name, entry in files.items():
                if self._size(_blob(entry)) == entry["size"]:
                    moved(entry["size"])
                else:
                    self._put(made.path / name, _blob(entry), moved)
        self._put(made.path / MANIFEST, _place(made.key), lambda count: None)
        return True

    def _files_of(self, folder: Path, key: str, id: str, kind: Kind) -> Mapping[str, FileEntry]:
        """Returns the files of a downloaded manifest, if it is of this artifact and every file stays within its folder."""
        place = f"{self.url}/{_place(key)}"
        try:
            found = artifact.load(folder)
        except DamagedArtifact as error:
            raise self._damaged(place, error.problem.given) from error
        files, names = found.manifest["files"], set(found.manifest["files"])
        if SEAL not in found.manifest or (found.key, found.id, found.kind) != (key, id, kind) or artifact.digest(files) != found.digest:
            raise self._damaged(place, "the manifest of another artifact, or without its digest")
        for name, entry in files.items():
            parents = {parent.as_posix() for parent in PurePosixPath(name).parents}
            if not _is_inside(name) or parents & names or not SHA256.fullmatch(entry["sha256"]) or entry["size"] < 0:
                raise self._damaged(place, "a file outside of its folder, or without a sha256")
        return files

    def _download(self, folder: Path, files: Mapping[str, FileEntry], moved: Callable[[int], None]) -> None:
        """Writes files whose contents have the hashes of the manifest."""
        for name, entry in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashed, left = hashlib.sha256(), entry["size"]
            size = self._size(_blob(entry))
            if size is None:
                raise _Absent
            with path.open("wb") as stream:
                for chunk in self._chunks(_blob(entry)) if size == left else ():
                    hashed.update(chunk)
                    left -= len(chunk)
                    stream.write(chunk)
                    moved(len(chunk))
            if left or hashed.hexdigest() != entry["sha256"]:
                raise self._damaged(f"{self.url}/{_blob(entry)}", f"{name} has other contents than its sha256 says")

    def _chunks(self, place: str) -> Iterator[bytes]:
        with _calls():
            try:
                stream = self._files.open(f"{self._root}/{place}", "rb")
            except FileNotFoundError as error:  # a lifecycle rule has just removed it
                raise _Absent from error
        with stream:
            while True:
                with _calls():
                    chunk = stream.read(CHUNK)
                if not chunk:
                    return
                yield chunk

    def _size(self, place: str) -> int | None:
        """Returns the bytes of an object; None if it does not exist."""
        with _calls():
            try:
                return int(self._files.info(f"{self._root}/{place}")["size"])
            except FileNotFoundError:
                return None

    def _read(self, place: str, most: int) -> bytes | None:
        """Returns a small object; None if it does not exist."""
        size = self._size(place)
        if size is not None and size > most:
            raise self._damaged(f"{self.url}/{place}", f"{size} bytes, at most {most} are expected")
        try:
            return None if size is None else b"".join(self._chunks(place))
        except _Absent:
            return None

    def _write(self, place: str, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "object"
            path.write_text(text, encoding="utf-8")
            self._put(path, place, lambda count: None)

    def _put(self, path: Path, place: str, moved: Callable[[int], None]) -> None:
        """Uploads a file, which appears when it is complete."""
        from fsspec.callbacks import Callback

        seen = 0

        def report(size: int | None, value: int, **more: object) -> None:
            nonlocal seen
            moved(value - seen)
            seen = value

        final, callback = f"{self._root}/{place}", Callback(hooks={"moved": report})
        with _calls():
            if self._whole:
                self._files.put_file(str(path), final, callback=callback)
                return
            temporary = f"{self._root}/uploads/{uuid.uuid4().hex}"
            self._files.makedirs(str(PurePosixPath(final).parent), exist_ok=True)
            self._files.makedirs(str(PurePosixPath(temporary).parent), exist_ok=True)
            self._files.put_file(str(path), temporary, callback=callback)
            self._files.mv(temporary, final)

    def _damaged(self, place: str, given: str) -> InputError:
        remedy = f"find out who writes to the store, remove {place} from it, and run again: the step is then computed"
        return InputError("store", f"damaged: {place}: {given}", remedy=remedy)


class _Absent(Exception):
    """The store no longer has a file of an artifact."""


def connect(url: str) -> RemoteStore:
    """Returns a store; sends nothing. The library of its protocol reads its credentials from the environment.

    Raises:
        InputError: The protocol is unknown, or its package is not installed.
    """
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        package = "pip install 'compress-transformers[s3]'" if protocol in ("s3", "s3a") else reason(error)
        raise InputError("store", f"{url} given, but the package that speaks {protocol}:// is not installed", remedy=package) from error
    except ValueError as error:
        raise InputError("store", f"{url} given", "a protocol of fsspec is allowed, such as s3, gs and file") from error
    with _calls():  # without the cache of listings: other machines write to the store
        files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return RemoteStore(url, files, root, protocol in WHOLE)


@contextmanager
def _calls() -> Iterator[None]:
    """Within the block every failure of the store, of its library or of the network is a `StoreFailure`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in LIBRARIES:
            raise
        raise StoreFailure(without_credentials(reason(error))) from error


def _place(key: str) -> str:
    return f"artifacts/{key}.json"


def _blob(entry: FileEntry) -> str:
    return f"blobs/{entry['sha256'][:2]}/{entry['sha256']}"


def _is_inside(name: str) -> bool:
    """Whether a name of a manifest is a path within the folder of the artifact, and can be a file's."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= LONGEST_NAME for part in parts)
    return plain and name != MANIFEST and not any(mark in name for mark in "\\\0")


def _megabytes(files: Mapping[str, FileEntry]) -> int:
    return max(1, sum(entry["size"] for entry in files.values()) // MEGABYTE)


def _moved(advance: Callable[[int], None]) -> Callable[[int], None]:
    """Returns what is called with bytes, and advances a bar of megabytes."""
    total = 0

    def moved(count: int) -> None:
        nonlocal total
        before, total = total // MEGABYTE, total + count
        if total // MEGABYTE > before:
            advance(total // MEGABYTE - before)

    return moved
