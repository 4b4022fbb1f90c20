"""Blobs that are kept: they are whole, belong to what they were made of, and do not fill the disk."""

import os
from pathlib import Path

import pytest

from triton_repo.blobs import BlobCache, prune

VERSIONS = {"openvino": "1"}


@pytest.fixture
def version(tmp_path) -> Path:
    folder = tmp_path / "version"
    (folder / "1").mkdir(parents=True)
    (folder / "openvino.bin").write_bytes(b"weights")
    (folder / "1" / "settings.json").write_text("{}")
    return folder


def opened(root: Path, version: Path, versions=VERSIONS) -> tuple[BlobCache, Path]:
    cache = BlobCache(versions, root)
    folder = cache.open(version)
    assert folder is not None
    return cache, folder


def filled(root: Path, version: Path) -> Path:
    cache, folder = opened(root, version)
    (folder / "a.blob").write_bytes(b"compiled")
    cache.seal()
    return folder


def test_a_second_start_finds_the_blobs(tmp_path, version):
    folder = filled(tmp_path / "blobs", version)
    cache, again = opened(tmp_path / "blobs", version)
    assert again == folder
    assert (folder / "a.blob").read_bytes() == b"compiled"
    cache.seal()


@pytest.mark.parametrize("damage", ["changed", "added", "removed", "unsealed", "manifest"])
def test_damaged_blobs_are_compiled_again(tmp_path, version, damage):
    folder = filled(tmp_path / "blobs", version)
    if damage == "changed":
        (folder / "a.blob").write_bytes(b"compilee")
    elif damage == "added":
        (folder / "b.blob").write_bytes(b"")
    elif damage == "removed":
        (folder / "a.blob").unlink()
    elif damage == "unsealed":
        (folder / "blobs.json").unlink()
    else:
        (folder / "blobs.json").write_text("{")
    _, again = opened(tmp_path / "blobs", version)
    assert [path.name for path in again.iterdir()] == [".lock"]


def test_blobs_belong_to_files_packages_and_processor(tmp_path, version, monkeypatch):
    folders = {filled(tmp_path / "blobs", version)}
    folders.add(opened(tmp_path / "blobs", version, {"openvino": "2"})[1])
    (version / "1" / "settings.json").write_text('{"mode": "dynamic"}')
    folders.add(opened(tmp_path / "blobs", version)[1])
    monkeypatch.setattr("triton_repo.blobs.hardware", lambda: {"cpu": "another", "cpu_features": []})
    folders.add(opened(tmp_path / "blobs", version)[1])
    assert len(folders) == 4


def test_two_starts_do_not_share_a_folder(tmp_path, version):
    first, folder = opened(tmp_path / "blobs", version)
    assert BlobCache(VERSIONS, tmp_path / "blobs").open(version) is None
    assert first.open(version) == folder
    first.seal()
    assert BlobCache(VERSIONS, tmp_path / "blobs").open(version) == folder


def test_the_oldest_go_first(tmp_path):
    for number, name in enumerate("abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.blob").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (number, number))
    prune(tmp_path, 250, {tmp_path / "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]
