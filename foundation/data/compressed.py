"""Opens compressed files with a limit on their expanded size: a few kilobytes of gzip may stand for terabytes."""

from __future__ import annotations

import gzip
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from foundation.core.errors import InputError
from foundation.core.files import open_plain

GB = 10**9
BUFFER = 2**16


@dataclass(frozen=True)
class Limit:
    """The largest expanded size of a file."""

    gb: float = 4.0
    """In 10^9 bytes."""
    key: str = ""
    """Key path in the recipe that raises it; empty if there is none."""

    def check(self, path: Path, size: int) -> None:
        """Raises an `InputError` if `size` bytes are too many."""
        if size > self.gb * GB:
            raised = f"raise {self.key}, or " if self.key else ""
            raise InputError(f"{path}", f"expands to more than {self.gb:g} GB", f"if the file is meant to, {raised}give it uncompressed")


def open_gzip(path: Path, limit: Limit) -> BinaryIO:
    """Opens a gzip file for reading; raises an `InputError` once more than the limit has been read."""
    return cast(BinaryIO, io.BufferedReader(_Limited(path, limit), BUFFER))


class _Limited(io.RawIOBase):
    def __init__(self, path: Path, limit: Limit) -> None:
        self._path, self._limit = path, limit
        self._file = open_plain(path)
        self._stream = gzip.GzipFile(fileobj=self._file, mode="rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        count: int = self._stream.readinto(buffer)  # type: ignore[arg-type]
        self._limit.check(self._path, self._stream.tell())
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            self._limit.check(self._path, offset)
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()
