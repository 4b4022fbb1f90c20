"""Image data sets: folders `split/class/file.jpg`, tar archives with the same layout, and the digits data set of scikit-learn.

An archive is read sequentially and never extracted, so its file names never touch the file system. It must be complete. The class of an
image is the folder that contains it. Hidden files (`.DS_Store`, `._x.jpg`) are skipped; anything else that is not a PNG or JPEG image is an
error.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
from PIL import Image

from compress.core.errors import InputError
from compress.core.files import open_plain, read_plain
from compress.core.shown import reason
from compress.data.compressed import Limit, open_gzip
from compress.standalone.preprocess import MAX_IMAGE_BYTES

ENDINGS = (".png", ".jpg", ".jpeg")
ARCHIVES = (".tar", ".tar.gz", ".tgz")
BLOCK = 512
KINDS = "PNG and JPEG images (.png .jpg .jpeg)"


@dataclass(frozen=True)
class LabelledImage:
    """One encoded image with its label."""

    place: str
    """File, or member of an archive, for error messages."""
    split: str | None
    """Name of the folder above the class folder, if it is part of the data set."""
    label: str
    """Class name."""
    data: bytes
    """The encoded image."""


def is_archive(path: Path) -> bool:
    """Whether a file name ends like a tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def read_images(path: Path, limit: Limit) -> Iterator[LabelledImage]:
    """Yields the images of a folder `class/file`, sorted by name, or of a tar archive, in the order of its members.

    Args:
        path: The folder or archive.
        limit: The largest expanded size of an archive.

    Raises:
        InputError: The archive is damaged or too large, or contains something other than images in class folders.
    """
    if path.is_dir():
        yield from _folder(path)
        return
    for parts, data in _members(path, limit):
        yield LabelledImage(f"{path} member {'/'.join(parts)}", parts[-3] if len(parts) > 2 else None, parts[-2], data)


def _folder(folder: Path) -> Iterator[LabelledImage]:
    for classes in sorted(folder.iterdir()):
        if classes.name.startswith("."):
            continue
        if not classes.is_dir():
            raise InputError(f"{classes}: not in a class folder; {folder.name}/CLASS/FILE with {KINDS} is allowed")
        for file in sorted(classes.iterdir()):
            if file.name.startswith("."):
                continue
            _check_name(str(file), file.name)
            try:
                _check_size(str(file), file.stat().st_size)
                yield LabelledImage(str(file), None, classes.name, read_plain(file, MAX_IMAGE_BYTES))
            except OSError as error:
                raise InputError(f"{file}: cannot be read ({reason(error)}); {KINDS} are allowed") from error


def _members(path: Path, limit: Limit) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Yields (path parts, contents) of every image in an archive."""
    try:
        with _open(path, limit) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                where, parts = f"{path} member {member.name!r:.120}", PurePosixPath(member.name).parts
                if member.isdir() or parts[-1:] == () or parts[-1].startswith("."):
                    continue
                _check_member(where, member, parts)
                content = archive.extractfile(member)
                assert content is not None, f"a plain file has contents: {member.name}"
                yield parts, content.read()
            _check_end(stream, archive.offset)
    except InputError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError) as error:  # the last two: numbers in a header
        raise InputError(f"{path}: not a complete tar archive ({reason(error)}); a .tar, .tar.gz or .tgz file is allowed") from error


def _open(path: Path, limit: Limit) -> BinaryIO:
    return open_plain(path) if path.name.lower().endswith(".tar") else open_gzip(path, limit)


def _check_end(stream: BinaryIO, offset: int) -> None:
    """Raises if an archive does not end properly: tarfile treats a damaged header as the end and would silently drop the rest."""
    stream.seek(offset)
    if stream.read(BLOCK) != bytes(BLOCK):
        raise tarfile.ReadError(f"neither a header nor the end of the archive at byte {offset}")
    while stream.read(2**20):  # to the end, so that gzip verifies its checksum
        pass


def _check_member(where: str, member: tarfile.TarInfo, parts: tuple[str, ...]) -> None:
    if not member.isfile():
        raise InputError(f"{where}: a link or device; plain files are allowed")
    if ".." in parts or parts[0] == "/":
        raise InputError(f"{where}: path outside the archive; SPLIT/CLASS/FILE is allowed")
    _check_name(where, parts[-1])
    if len(parts) < 2:
        raise InputError(f"{where}: not in a class folder; CLASS/FILE or SPLIT/CLASS/FILE is allowed")
    _check_size(where, member.size)


def _check_name(where: str, name: str) -> None:
    if not name.lower().endswith(ENDINGS):
        raise InputError(f"{where}: not the name of an image; {KINDS} are allowed")


def _check_size(where: str, size: int) -> None:
    if size > MAX_IMAGE_BYTES:
        raise InputError(f"{where}: {size} bytes; images of at most {MAX_IMAGE_BYTES} bytes are allowed")


def digits() -> list[LabelledImage]:
    """Returns the 1,797 digits of scikit-learn as 8 x 8 greyscale PNG images: the train split, then the test split.

    The split is stratified, 80/20, with seed 0. Pixel values 0 to 16 are scaled to 0 to 255.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(np.arange(len(pixels)), test_size=0.2, stratify=bunch.target, random_state=0)

    def encode(index: int, split: str) -> LabelledImage:
        file = io.BytesIO()
        Image.fromarray(pixels[index]).save(file, "PNG")
        return LabelledImage(f"sklearn:digits image {index}", split, str(bunch.target[index]), file.getvalue())

    return [encode(i, "train") for i in train] + [encode(i, "test") for i in test]
