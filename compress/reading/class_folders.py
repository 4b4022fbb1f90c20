"""Data sets of files in class folders: `split/class/file.wav`, or tar archives with the same layout.

An archive is read sequentially and never extracted, so its file names never touch the file system. It must be complete. The class of a
file is the folder that contains it. Hidden files (`.DS_Store`, `._x.jpg`) are skipped; anything else that is not of the kind that a task
reads is an error.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from foundation.core.errors import InputError
from foundation.core.files import open_plain, read_plain
from foundation.core.shown import reason
from foundation.data.compressed import Limit, open_gzip
from foundation.standalone.image import MAX_IMAGE_BYTES, decode_image
from foundation.standalone.sound import MAX_SOUND_BYTES, read_sound

ARCHIVES = (".tar", ".tar.gz", ".tgz")
BLOCK = 512


@dataclass(frozen=True)
class FileKind:
    """The files of a modality."""

    one: str
    """Name of one file of the modality, for messages."""
    endings: tuple[str, ...]
    """Endings of their names."""
    an: str
    """The same with its article."""
    named: str
    """Allowed files, for messages."""
    most_bytes: int
    """The largest one."""
    check: Callable[[bytes], object]
    """Raises a `ValueError` with a line for data that cannot be decoded."""


KINDS: Mapping[str, FileKind] = {
    "image": FileKind(
        "image",
        (".png", ".jpg", ".jpeg"),
        "an image",
        "PNG and JPEG images (.png .jpg .jpeg)",
        MAX_IMAGE_BYTES,
        lambda data: decode_image(data, draft=True),
    ),
    "audio": FileKind("sound", (".wav", ".flac"), "a sound", "WAV and FLAC sounds (.wav .flac)", MAX_SOUND_BYTES, read_sound),
}
"""Kinds of files by modality; text is not made of files."""


@dataclass(frozen=True)
class LabelledFile:
    """One encoded file with its label."""

    place: str
    """File, or member of an archive, for error messages."""
    split: str | None
    """Name of the folder above the class folder, if it is part of the data set."""
    label: str
    """Class name."""
    data: bytes
    """Its contents."""


def is_archive(path: Path) -> bool:
    """Whether a file name ends like a tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def read_files(path: Path, kind: FileKind, limit: Limit) -> Iterator[LabelledFile]:
    """Yields the files of a folder `class/file`, sorted by name, or of a tar archive, in the order of its members.

    Args:
        path: The folder or archive.
        kind: What the files have to be.
        limit: The largest expanded size of an archive.

    Raises:
        InputError: The archive is damaged or too large, or contains something else than such files in class folders.
    """
    if path.is_dir():
        yield from _folder(path, kind)
        return
    for parts, data in _members(path, kind, limit):
        yield LabelledFile(f"{path} member {'/'.join(parts)}", parts[-3] if len(parts) > 2 else None, parts[-2], data)


def _folder(folder: Path, kind: FileKind) -> Iterator[LabelledFile]:
    for classes in sorted(folder.iterdir()):
        if classes.name.startswith("."):
            continue
        if not classes.is_dir():
            raise InputError(f"{classes}", "not in a class folder", f"{folder.name}/CLASS/FILE with {kind.named} is allowed")
        for file in sorted(classes.iterdir()):
            if file.name.startswith("."):
                continue
            _check_name(str(file), file.name, kind)
            try:
                _check_size(str(file), file.stat().st_size, kind)
                yield LabelledFile(str(file), None, classes.name, read_plain(file, kind.most_bytes))
            except OSError as error:
                raise InputError(f"{file}", f"cannot be read ({reason(error)})", f"{kind.named} are allowed") from error


def _members(path: Path, kind: FileKind, limit: Limit) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Yields (path parts, contents) of every file in an archive."""
    try:
        with _open(path, limit) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                where, parts = f"{path} member {member.name!r:.120}", PurePosixPath(member.name).parts
                if member.isdir() or parts[-1:] == () or parts[-1].startswith("."):
                    continue
                _check_member(where, member, parts, kind)
                content = archive.extractfile(member)
                assert content is not None, f"a plain file has contents: {member.name}"
                yield parts, content.read()
            _check_end(stream, archive.offset)
    except InputError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError) as error:  # the last two: numbers in a header
        raise InputError(f"{path}", f"not a complete tar archive ({reason(error)})", "a .tar, .tar.gz or .tgz file is allowed") from error


def _open(path: Path, limit: Limit) -> BinaryIO:
    return open_plain(path) if path.name.lower().endswith(".tar") else open_gzip(path, limit)


def _check_end(stream: BinaryIO, offset: int) -> None:
    """Raises if an archive does not end properly: tarfile treats a damaged header as the end and would silently drop the rest."""
    stream.seek(offset)
    if stream.read(BLOCK) != bytes(BLOCK):
        raise tarfile.ReadError(f"neither a header nor the end of the archive at byte {offset}")
    while stream.read(2**20):  # to the end, so that gzip verifies its checksum
        pass


def _check_member(where: str, member: tarfile.TarInfo, parts: tuple[str, ...], kind: FileKind) -> None:
    if not member.isfile():
        raise InputError(where, "a link or device", "plain files are allowed")
    if ".." in parts or parts[0] == "/":
        raise InputError(where, "path outside the archive", "SPLIT/CLASS/FILE is allowed")
    _check_name(where, parts[-1], kind)
    if len(parts) < 2:
        raise InputError(where, "not in a class folder", "CLASS/FILE or SPLIT/CLASS/FILE is allowed")
    _check_size(where, member.size, kind)


def _check_name(where: str, name: str, kind: FileKind) -> None:
    if not name.lower().endswith(kind.endings):
        raise InputError(where, f"not the name of {kind.an}", f"{kind.named} are allowed")


def _check_size(where: str, size: int, kind: FileKind) -> None:
    if size > kind.most_bytes:
        raise InputError(where, f"{size} bytes", f"{kind.one}s of at most {kind.most_bytes} bytes are allowed")
