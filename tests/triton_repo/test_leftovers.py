import subprocess
import uuid
from pathlib import Path

import pytest

from triton_repo import leftovers


@pytest.fixture
def left(tmp_path):
    """A prefix, a region with it, a region without it, and a folder with a file."""
    prefix = f"compress-test-{uuid.uuid4().hex}-"
    mine, other, folder = leftovers.SHARED_MEMORY / f"{prefix}region", leftovers.SHARED_MEMORY / f"other-{prefix}", tmp_path / "folder"
    (folder / "python").mkdir(parents=True)
    for file in (mine, other, folder / "python" / "stub"):
        file.touch()
    yield prefix, mine, other, folder
    mine.unlink(missing_ok=True)
    other.unlink(missing_ok=True)


def test_everything_goes_when_the_watcher_is_gone(left):
    prefix, mine, other, folder = left
    watcher = subprocess.Popen(["sleep", "600"])
    reaper = leftovers.reap(prefix, folder, watcher.pid)
    assert mine.exists()
    assert reaper.poll() is None
    watcher.kill()
    watcher.wait()
    assert reaper.wait(30) == 0
    assert [path.exists() for path in (mine, other, folder)] == [False, True, False]


def test_a_watcher_that_is_gone_already(left):
    prefix, mine, _, folder = left
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert leftovers.reap(prefix, folder, gone.pid).wait(30) == 0
    assert not mine.exists()


def test_a_folder_that_is_gone_already():
    leftovers.remove(f"compress-test-{uuid.uuid4().hex}-", Path("/nonexistent/folder"))
