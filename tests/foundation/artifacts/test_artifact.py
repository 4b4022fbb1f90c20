import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.artifacts import artifact


def make(folder: Path, contents: dict[str, bytes], key: str = "k") -> artifact.Artifact:
    with artifact.writing(folder) as temporary:
        for name, data in contents.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        artifact.seal(temporary, id="stage", kind="checkpoint", key=key, parents=[], fields={"metrics": {"a": 1}, "seconds": 1.0})
    return artifact.load(folder)


def test_written_artifact_reads_back_and_verifies(tmp_path: Path) -> None:
    made = make(tmp_path / "a", {"x.bin": b"123", "sub/y.txt": b""})
    assert artifact.verify(made) == []
    assert made.size_bytes == 3
    assert (made.id, made.kind, made.key, made.metrics) == ("stage", "checkpoint", "k", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_digest_depends_on_contents_and_names_alone(tmp_path: Path) -> None:
    first = make(tmp_path / "a", {"x": b"1"}, key="one")
    assert make(tmp_path / "b", {"x": b"1"}, key="two").digest == first.digest
    assert make(tmp_path / "c", {"x": b"2"}).digest != first.digest
    assert make(tmp_path / "d", {"y": b"1"}).digest != first.digest


def test_exception_leaves_the_old_artifact_and_no_trace(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x": b"old"})

    def fail() -> None:
        with artifact.writing(tmp_path / "a") as temporary:
            (temporary / "x").write_bytes(b"new")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert (tmp_path / "a" / "x").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_writing_replaces_what_stood_there(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x": b"old", "z": b"gone"})
    assert sorted(make(tmp_path / "a", {"x": b"new"}).manifest["files"]) == ["x"]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("killed", [True, False])
def test_what_is_replaced_is_not_lost_between_the_renames(killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", {"x": b"old"})
    rename, rmtree = Path.rename, artifact.shutil.rmtree

    def stopped(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise RuntimeError("stopped")
        return rename(self, target) if not killed or target.suffix == ".old" else self  # a killed process renames nothing more

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        patch.setattr(artifact.shutil, "rmtree", lambda path, **_: None if killed else rmtree(path, ignore_errors=True))
        with pytest.raises(RuntimeError, match="stopped"):
            make(tmp_path / "a", {"x": b"new"})
    assert (tmp_path / "a").exists() != killed
    artifact.put_back(tmp_path / "a")
    assert (tmp_path / "a" / "x").read_bytes() == b"old"
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "a"] == [".tmp"] * killed
    artifact.put_back(tmp_path / "a")  # nothing to do
    assert (tmp_path / "a" / "x").read_bytes() == b"old"


@given(parents=st.lists(st.integers(0, 7), max_size=8), made=st.integers(0, 8))
def test_lineage_is_the_way_from_the_first(parents: list[int], made: int) -> None:
    """Against following the parents by hand, in any tree."""
    tree = [None, *(parent % (i + 1) for i, parent in enumerate(parents))]  # everything is made of something before it
    artifacts = {
        str(i): artifact.Artifact(Path(), {"digest": f"d{i}", "parents": ["unknown" if parent is None else f"d{parent}"]})
        for i, parent in enumerate(tree)
    }
    at: int | None = made % len(tree)
    expected: list[str] = []
    while at is not None:
        expected.insert(0, str(at))
        at = tree[at]
    assert artifact.lineage(expected[-1], artifacts) == expected


@given(data=st.data())
def test_every_flipped_byte_is_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    contents = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c/d"]), st.binary(min_size=1, max_size=40), min_size=1))
    made = make(tmp_path_factory.mktemp("flip") / "a", contents)
    name = data.draw(st.sampled_from(sorted(contents)))
    position = data.draw(st.integers(0, len(contents[name]) - 1))
    damaged = bytearray(contents[name])
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    (made.path / name).write_bytes(bytes(damaged))
    [problem] = map(str, artifact.verify(made))
    assert str(made.path / name) in problem


def test_missing_added_and_forged_files_are_named(tmp_path: Path) -> None:
    made = make(tmp_path / "a", {"x": b"1", "y": b"2"})
    (made.path / "x").unlink()
    (made.path / "new").write_bytes(b"")
    assert [line.rsplit(": ", 1)[1] for line in map(str, artifact.verify(made))] == ["missing", "not in the manifest"]
    manifest = json.loads((made.path / artifact.MANIFEST).read_text())
    manifest["files"]["y"]["sha256"] = "0" * 64
    (made.path / artifact.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(artifact.DamagedArtifact, match="differ from its own digest"):
        artifact.load(made.path)
    del manifest[artifact.SEAL]  # as an earlier version wrote it
    (made.path / artifact.MANIFEST).write_text(json.dumps(manifest))
    assert any("digest does not match" in line for line in map(str, artifact.verify(artifact.load(made.path))))


@pytest.mark.parametrize("change", [{"metrics": {"accuracy": 1.0}}, {"config": {}}, {"parents": ["x"]}, {"seconds": 0}])
def test_a_forged_entry_of_a_manifest_is_damage(tmp_path: Path, change: dict[str, object]) -> None:
    made = make(tmp_path / "a", {"x": b"1"})
    manifest = json.loads((made.path / artifact.MANIFEST).read_text())
    (made.path / artifact.MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(artifact.DamagedArtifact, match="differ from its own digest"):
        artifact.load(made.path)


def test_a_manifest_of_an_earlier_version_without_a_seal_is_read(tmp_path: Path) -> None:
    made = make(tmp_path / "a", {"x": b"1"})
    manifest = json.loads((made.path / artifact.MANIFEST).read_text())
    del manifest[artifact.SEAL]
    (made.path / artifact.MANIFEST).write_text(json.dumps(manifest))
    assert artifact.verify(artifact.load(made.path)) == []


@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "empty folder", "socket", "pipe"])
def test_what_cannot_be_hashed_is_named(tmp_path: Path, kind: str) -> None:
    made, stranger = make(tmp_path / "a", {"x": b"1"}), tmp_path / "a" / "stranger"
    place(stranger, kind)
    [problem] = map(str, artifact.verify(made))
    assert problem.startswith(f"{stranger}: ")
    with pytest.raises(ValueError, match="stranger"):
        artifact.seal(made.path, id="a", kind="checkpoint", key="k", parents=[], fields={})


def test_a_link_to_the_artifact_is_named(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x": b"1"})
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert [*map(str, artifact.verify(artifact.load(tmp_path / "b")))] == [f"{tmp_path / 'b'}: is a link, not a folder"]


def place(path: Path, kind: str) -> None:
    if kind == "empty folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("x" if kind == "link to a file" else "/usr")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}'])
def test_unreadable_manifest_is_damage(tmp_path: Path, text: str) -> None:
    made = make(tmp_path / "a", {"x": b"1"})
    (made.path / artifact.MANIFEST).write_text(text)
    with pytest.raises(artifact.DamagedArtifact, match=r"manifest\.json"):
        artifact.load(made.path)


def test_digest_of_json_ignores_order_of_keys() -> None:
    assert artifact.digest({"a": 1, "b": [1, 2]}) == artifact.digest({"b": [1, 2], "a": 1})
    assert artifact.digest({"a": [1, 2]}) != artifact.digest({"a": [2, 1]})


def test_write_text_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t"
    artifact.write_text(target, "old")

    def refuse(self: Path, other: Path) -> Path:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        artifact.write_text(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
