"""Connections that break because another process was ended."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from foundation.machine.faults import LOST, fault_of, is_lost, line_of, writing_to


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:47020: Connection reset by peer."), True),
        (RuntimeError("Got the following error: [pair.cc:553] Connection closed by peer [127.0.0.1]:8368"), True),
        (caused(ValueError("the callback failed"), RuntimeError("Connection closed by peer")), True),
        (RuntimeError("Read error [10.77.0.2]:47020: Connection timed out"), True),
        (RuntimeError("connect [10.77.0.2]:47020: No route to host"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection reset by peer"), False),  # a value that says so
        (OSError(104, "Connection reset by peer"), False),  # a download, not a process
    ],
)
def test_a_lost_process_is_known_by_what_torch_says(error: Exception, lost: bool) -> None:
    assert is_lost(error) is lost
    assert fault_of(error) is None
    assert "\n" not in LOST


def test_a_write_without_the_name_of_its_file_gets_one(tmp_path: Path) -> None:
    for given, named in ((None, tmp_path / "tensors"), (tmp_path / "other", tmp_path / "other")):
        with pytest.raises(OSError, match="No space") as caught, writing_to(tmp_path / "tensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), given and str(given))
        assert caught.value.filename == str(named)
    with pytest.raises(OSError, match=r"^odd$"), writing_to(tmp_path):
        raise OSError("odd")


@pytest.mark.parametrize(
    ("path", "instead"), [("/shared/runs/large/log.txt", "--out DIR"), (f"{tempfile.gettempdir()}/pieces", "TMPDIR"), (None, "--out DIR")]
)
def test_a_full_disk_is_named_with_its_machine(path: str | None, instead: str) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    line = line_of(error, "process 3 on node-b")
    assert line.startswith(f"process 3 on node-b: {path or 'the run folder'}: No space left on device")
    assert instead in line
    assert line_of(error) == line.removeprefix("process 3 on node-b: ")
