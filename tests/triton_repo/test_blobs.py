"""Folders of compiled networks: they belong to what they were made of, and do not fill the disk."""

import json
import os
from pathlib import Path

import pytest

from triton_repo import blobs
from triton_repo.blobs import BlobCache, prune
from triton_repo.live import KEPT, LiveRepository

VERSIONS = {"openvino": "1"}


@pytest.fixture
def version(tmp_path) -> Path:
    folder = tmp_path / "version"
    (folder / "1").mkdir(parents=True)
    (folder / "openvino.bin").write_bytes(b"weights")
    (folder / "1" / "settings.json").write_text("{}")
    return folder


def test_a_second_start_has_the_same_folder_at_the_same_time(tmp_path, version):
    folder = BlobCache(VERSIONS, tmp_path / "blobs").open(version)
    (folder / "1x8.network").write_bytes(b"compiled")
    assert BlobCache(VERSIONS, tmp_path / "blobs").open(version) == folder
    assert (folder / "1x8.network").read_bytes() == b"compiled"
    assert folder.stat().st_mode & 0o077 == 0


def test_networks_belong_to_files_packages_and_processor(tmp_path, version, monkeypatch):
    folders = {BlobCache(VERSIONS, tmp_path / "blobs").open(version)}
    folders.add(BlobCache({"openvino": "2"}, tmp_path / "blobs").open(version))
    (version / "1" / "settings.json").write_text('{"mode": "dynamic"}')
    folders.add(BlobCache(VERSIONS, tmp_path / "blobs").open(version))
    monkeypatch.setattr("triton_repo.blobs.hardware", lambda: {"cpu": "another", "cpu_features": []})
    folders.add(BlobCache(VERSIONS, tmp_path / "blobs").open(version))
    assert len(folders) == 4


def test_the_oldest_go_first(tmp_path):
    for number, name in enumerate("abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.network").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (number, number))
    prune(tmp_path, 250, {tmp_path / "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_the_server_finds_kept_networks_by_a_path_of_its_own_folder(tmp_path):
    version = tmp_path / "repository" / "m" / "1"
    version.mkdir(parents=True)
    (version / "openvino.xml").touch()
    (version / "engine.py").write_text(f"KEPT = {KEPT!r}")
    (version.parent / "config.pbtxt").write_text('name: "m"')
    LiveRepository(tmp_path / "live", tmp_path / "repository", BlobCache(VERSIONS, tmp_path / "gr\u00f6\u00dfe"))
    kept = Path(json.loads((tmp_path / "live" / "m" / "1" / "machine.json").read_text())[KEPT])
    (kept / "x.network").touch()
    assert kept.is_relative_to(tmp_path / "live")
    assert str(kept).isascii()
    assert len(list((tmp_path / "gr\u00f6\u00dfe").glob("*/x.network"))) == 1


def test_a_machine_that_has_kept_nothing_yet_has_nothing_to_delete(tmp_path):
    BlobCache(VERSIONS, tmp_path / "blobs").prune()
    assert not (tmp_path / "blobs").exists()


def test_a_start_makes_its_folder_the_last_to_go(tmp_path, version, monkeypatch):
    root = tmp_path / "blobs"
    folder = BlobCache(VERSIONS, root).open(version)
    (folder / "1x8.network").write_bytes(b"x" * 100)
    os.utime(folder, (0, 0))
    (root / "other").mkdir()
    (root / "other" / "1x8.network").write_bytes(b"x" * 100)
    os.utime(root / "other", (1, 1))
    monkeypatch.setattr(blobs, "MOST_BYTES", 150)
    BlobCache(VERSIONS, root).open(version)
    BlobCache(VERSIONS, root).prune()
    assert [path.name for path in root.iterdir()] == [folder.name]
