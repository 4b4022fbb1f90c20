"""Faults of the machine, such as a full disk or a read-only folder: recognized in the exceptions that they raise, and reported in one
line."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), "remove what is in the way"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.ENOENT: "leave the folders of a run alone while it works",
    errno.EFBIG: "raise the limit of the file size (ulimit -f)",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EIO: "check the disk",
    errno.ENOMEM: "free some memory, or use a machine with more",
}
_MEMORY = ("can't allocate memory", "CUDA out of memory", "bad_alloc")
_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Connection timed out",
    "No route to host",
    "Broken pipe",
    "remote process has terminated",
)
LOST = "another process of the run is gone: it was ended, or its machine or the network failed; run the same command to continue"
"""Message if no other process knows which one failed."""
_UNDERLYING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that are the cause, whatever followed from them."""


class Fault(Exception):
    """A fault of the machines of a run; its text is the line that reports it."""


class FailedElsewhere(Exception):
    """Another process of the run failed first, which is reported; this one ends without a message."""


def fault_of(error: BaseException) -> OSError | None:
    """Returns the error if the machine caused it (full disk, read-only folder); some libraries name it only in their message."""
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        return error
    above = error.__cause__ or error.__context__
    underlying = fault_of(above) if above is not None else None
    if underlying is not None and underlying.errno in _UNDERLYING:
        return underlying
    if isinstance(error, OSError):
        return None
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in _MEMORY):
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "this process")
    found = next((number for number in _UNDERLYING if os.strerror(number) in text), None)
    return OSError(found, os.strerror(found)) if found is not None else None


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Names a path in an error of the block that names none: writing to a full disk fails without the name of the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_lost(error: BaseException) -> bool:
    """Whether the connection to another process of the run broke, as torch.distributed reports it."""
    above = error.__cause__ or error.__context__
    return (isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)) or (above is not None and is_lost(above))


def line_of(error: OSError, process: str = "") -> str:
    """Returns the fault and its remedy.

    Args:
        error: A fault, as `fault_of` returns it.
        process: Which of several processes has it, and where it runs: each machine has disks of its own.
    """
    where = os.fsdecode(error.filename or "the run folder")
    instead = "set TMPDIR to another folder" if Path(where).is_relative_to(tempfile.gettempdir()) else "give another --out DIR"
    text = f"{where}: {error.strerror}; {_REMEDIES[error.errno or 0]} or {instead}; finished stages are kept"
    return f"{process}: {text}" if process else text
