"""A store at s3://, over s3fs, against the server of moto; needs `pip install s3fs 'moto[server]'`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.artifacts import artifact
from foundation.artifacts.remote import StoreFailure, connect
from foundation.core.errors import InputError
from tests.foundation.artifacts.test_remote import FILES, KEY, SILENT, fetched, written
from tests.s3_server import SECRET, s3_server

pytestmark = pytest.mark.slow

WRITER = """
import sys
from pathlib import Path
from foundation.artifacts import artifact
from foundation.artifacts.remote import connect
from foundation.core.progress import ConsoleProgress
print("ready", flush=True)
connect(sys.argv[1]).upload(artifact.load(Path(sys.argv[2])), True, ConsoleProgress("silent"))
"""


@pytest.fixture
def url() -> Iterator[str]:
    with s3_server() as url:
        yield url


def writer(url: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, url, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_write_one_key_and_a_corrupt_blob_is_refused(url: str, tmp_path: Path) -> None:
    both = [written(tmp_path / name, {**FILES, "big": os.urandom(9_000_000)}) for name in ("one", "two")]
    processes = [writer(url, made.path) for made in both]
    assert [process.wait(120) for process in processes] == [0, 0]
    back = fetched(connect(url), tmp_path / "b")
    assert back is not None
    assert not artifact.verify(back)
    assert back.digest in {made.digest for made in both}
    import s3fs

    digest, files = back.manifest["files"]["model.bin"]["sha256"], s3fs.S3FileSystem()
    files.pipe_file(f"{url}/blobs/{digest[:2]}/{digest}", b"W" * len(FILES["model.bin"]))
    with pytest.raises(InputError) as caught:
        fetched(connect(url), tmp_path / "c")
    assert digest in caught.value.problems[0].remedy
    assert not (tmp_path / "c").exists()


def test_a_writer_that_is_killed_leaves_nothing_that_a_reader_takes(url: str, tmp_path: Path) -> None:
    made = written(tmp_path / "a", {"a": b"small", "big": os.urandom(150_000_000)})
    process, store = writer(url, made.path), connect(url)
    import s3fs

    while not s3fs.S3FileSystem(use_listings_cache=False).exists(f"{url}/blobs"):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not store.has(KEY)
    assert fetched(store, tmp_path / "b") is None
    assert store.upload(made, False, SILENT)
    back = fetched(store, tmp_path / "b")
    assert back is not None
    assert not artifact.verify(back)


def test_a_bucket_that_does_not_exist_is_a_failure_without_credentials(url: str) -> None:
    with pytest.raises(StoreFailure) as caught:
        connect("s3://no-such-bucket/x").begin(create=True)
    assert SECRET not in str(caught.value)
