"""Reads the files that a user names. Only plain files are opened: opening a FIFO waits forever, and a device may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from foundation.core.errors import InputError
from foundation.core.shown import reason, shown

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def local(value: str | Path, key: str) -> Path:
    """Returns a path with `~` replaced by the home folder; the path need not exist.

    Args:
        value: The path as the user wrote it.
        key: Where it was given, for the message.

    Raises:
        InputError: No file can have this path: it names an unknown user, is too long, has a NUL character, or may not be looked at.
    """
    try:
        path = Path(value).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the user after ~ is unknown
        raise InputError(
            key, f"{shown(str(value), 80)} cannot be a path here ({reason(error)})", remedy="give the path of a file or folder"
        ) from error
    return path


def check_plain(path: Path, where: str) -> None:
    """Checks that a path is a plain file, if there is anything.

    Args:
        path: The file.
        where: Start of the message.

    Raises:
        InputError: It is a folder, a FIFO, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # opening the file reports it
        return
    if not stat.S_ISREG(mode):
        raise InputError(where, f"is {KINDS.get(stat.S_IFMT(mode), 'not a plain file')}", "only plain files are read", "give one")


def open_plain(path: Path, where: str | None = None) -> BinaryIO:
    """Opens a plain file for reading.

    Raises:
        InputError: It is a folder, a FIFO, a socket or a device.
        OSError: It cannot be opened.
    """
    check_plain(path, where or str(path))
    return path.open("rb")


def read_plain(path: Path, most: int, where: str | None = None) -> bytes:
    """Returns the contents of a plain file of at most `most` bytes.

    Raises:
        InputError: It is larger, or not a plain file.
        OSError: It cannot be read.
    """
    where = where or str(path)
    with open_plain(path, where) as stream:
        found = stream.read(most + 1)
    if len(found) > most:
        raise InputError(where, f"{path.stat().st_size} bytes", f"at most {most} are allowed")
    return found
