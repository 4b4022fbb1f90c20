"""A store of artifacts at file:// and memory://: whole artifacts or none, and no byte that was not hashed."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from foundation.artifacts import artifact
from foundation.artifacts.artifact import MANIFEST, SEAL, Artifact
from foundation.artifacts.remote import MARK, RemoteStore, StoreFailure, connect
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.problems import raises_problem

KEY = "ab" * 32
FILES = {"model.bin": b"weights" * 9, "config/a.json": b"{}", "config/copy.json": b"{}", "empty": b""}
SILENT = ConsoleProgress("silent")


def written(folder: Path, files: dict[str, bytes] = FILES, **more: Any) -> Artifact:
    with artifact.writing(folder) as temporary:
        for name, contents in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(contents)
        artifact.seal(temporary, id="finetune", kind="checkpoint", key=KEY, parents=[], fields={"seconds": 1.0, **more})
    return artifact.load(folder)


def fetched(store: RemoteStore, folder: Path) -> Artifact | None:
    return store.fetch(KEY, folder, "finetune", "checkpoint", SILENT)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteStore:
    made = connect(f"file://{tmp_path / 'store'}" if request.param == "file" else f"memory://{uuid.uuid4().hex}")
    made.begin(create=True)
    return made


@pytest.fixture
def folder_store(tmp_path: Path) -> tuple[RemoteStore, Path]:
    return connect(f"file://{tmp_path / 'store'}"), tmp_path / "store"


def test_an_artifact_comes_back_byte_by_byte(store: RemoteStore, tmp_path: Path) -> None:
    assert store.begin(create=False)
    assert fetched(store, tmp_path / "b") is None
    assert not (tmp_path / "b").exists()
    made = written(tmp_path / "a")
    assert store.upload(made, False, SILENT)
    back = fetched(store, tmp_path / "b")
    assert back is not None
    assert back.manifest == made.manifest
    assert not artifact.verify(back)
    assert (tmp_path / "b" / MANIFEST).read_bytes() == (tmp_path / "a" / MANIFEST).read_bytes()
    assert {name: (tmp_path / "b" / name).read_bytes() for name in FILES} == FILES


def test_the_first_one_stays_unless_it_is_replaced(store: RemoteStore, tmp_path: Path) -> None:
    store.upload(written(tmp_path / "a"), False, SILENT)
    other = written(tmp_path / "other", {"model.bin": b"others"})
    assert not store.upload(other, False, SILENT)
    back = fetched(store, tmp_path / "b")
    assert back is not None
    assert back.digest != other.digest
    assert store.upload(other, True, SILENT)
    back = fetched(store, tmp_path / "b")
    assert back is not None
    assert (back.digest, sorted(artifact.files_below(back.path))) == (other.digest, ["model.bin"])


def test_a_changed_byte_is_refused_and_the_folder_stays_as_it_was(folder_store: tuple[RemoteStore, Path], tmp_path: Path) -> None:
    store, root = folder_store
    made = written(tmp_path / "a")
    store.upload(made, False, SILENT)
    digest = made.manifest["files"]["model.bin"]["sha256"]
    blob = root / "blobs" / digest[:2] / digest
    blob.write_bytes(b"W" + blob.read_bytes()[1:])
    before = written(tmp_path / "b", {"x": b"earlier"})
    with pytest.raises(InputError) as caught:
        fetched(store, tmp_path / "b")
    assert caught.value.problems[0].key == "store"
    assert digest in caught.value.problems[0].remedy
    assert artifact.load(tmp_path / "b").digest == before.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "store"], "no partial folder"
    blob.unlink()  # what the line says to do
    assert fetched(store, tmp_path / "b") is None
    assert store.upload(made, True, SILENT)
    assert fetched(store, tmp_path / "b") is not None


def test_what_is_looked_at_comes_without_files_but_those_that_are_taken(store: RemoteStore, tmp_path: Path) -> None:
    assert store.look(KEY, tmp_path / "none", "finetune", "checkpoint") is None
    made = written(tmp_path / "a")
    store.upload(made, False, SILENT)
    found = store.look(KEY, tmp_path / "b", "finetune", "checkpoint")
    assert found is not None
    assert found.manifest == made.manifest
    assert not artifact.files_below(found.path)
    store.take(found, ["config/a.json", "../outside"])
    assert list(artifact.files_below(found.path)) == ["config/a.json"]
    assert (found.path / "config" / "a.json").read_bytes() == FILES["config/a.json"]


def test_what_lost_a_file_is_not_offered(folder_store: tuple[RemoteStore, Path], tmp_path: Path) -> None:
    store, root = folder_store
    made = written(tmp_path / "a")
    store.upload(made, False, SILENT)
    found = store.look(KEY, tmp_path / "b", "finetune", "checkpoint")
    assert found is not None
    digest = made.manifest["files"]["model.bin"]["sha256"]
    (root / "blobs" / digest[:2] / digest).unlink()
    with raises_problem("store", KEY):
        store.take(found, ["model.bin"])
    assert store.look(KEY, tmp_path / "c", "finetune", "checkpoint") is None


def test_a_file_that_is_shorter_in_the_store_is_refused_and_uploaded_again(folder_store: tuple[RemoteStore, Path], tmp_path: Path) -> None:
    store, root = folder_store
    made = written(tmp_path / "a")
    store.upload(made, False, SILENT)
    digest = made.manifest["files"]["model.bin"]["sha256"]
    (root / "blobs" / digest[:2] / digest).write_bytes(b"wei")
    with pytest.raises(InputError):
        fetched(store, tmp_path / "b")
    store.upload(made, True, SILENT)
    assert fetched(store, tmp_path / "b") is not None


@pytest.mark.parametrize("stop", range(1, 5))
def test_an_upload_that_breaks_off_leaves_no_artifact(
    stop: int, store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, put, calls = written(tmp_path / "a"), store._files.put_file, []

    def broken(*arguments: Any, **more: Any) -> None:
        calls.append(arguments)
        if len(calls) == stop:  # in the middle of a file, and last of the manifest
            Path(arguments[0]).with_name("half").write_bytes(Path(arguments[0]).read_bytes()[:1])
            put(str(Path(arguments[0]).with_name("half")), *arguments[1:], **more)
            raise KeyboardInterrupt
        put(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(store._files, "put_file", broken)
        with pytest.raises(KeyboardInterrupt):
            store.upload(made, False, SILENT)
    assert not store.has(KEY)
    assert fetched(store, tmp_path / "b") is None
    for half in (tmp_path / "a").rglob("half"):
        half.unlink()
    assert store.upload(made, False, SILENT)
    assert fetched(store, tmp_path / "b") is not None


def test_two_writers_of_different_bytes_end_with_one_whole_artifact(folder_store: tuple[RemoteStore, Path], tmp_path: Path) -> None:
    store, _ = folder_store
    both = [written(tmp_path / name, {"model.bin": name.encode() * 5000, "same": b"same"}) for name in ("one", "two")]
    gate = Barrier(2)

    def write(made: Artifact) -> None:
        gate.wait()
        store.upload(made, True, ConsoleProgress("silent"))

    threads = [Thread(target=write, args=(made,)) for made in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = fetched(store, tmp_path / "b")
    assert back is not None
    assert not artifact.verify(back)
    assert back.digest in {made.digest for made in both}


def rewritten(change: Callable[[dict[str, Any]], object], sealed: bool = True) -> Callable[[Path], None]:
    """Returns what changes a manifest of the store, with digests that fit it."""

    def apply(path: Path) -> None:
        manifest = json.loads(path.read_text())
        change(manifest)
        manifest["digest"] = artifact.digest(manifest["files"])
        del manifest[SEAL]
        path.write_text(json.dumps({**manifest, SEAL: artifact.digest(manifest)} if sealed else manifest))

    return apply


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["files"].update({name: manifest["files"].pop("empty")})


@pytest.mark.parametrize(
    "change",
    [
        rewritten(renamed("../outside")),
        rewritten(renamed("/tmp/outside")),
        rewritten(renamed("config/../../outside")),
        rewritten(renamed("model.bin/below")),
        rewritten(renamed(MANIFEST)),
        rewritten(renamed("a\\b")),
        rewritten(lambda manifest: manifest["files"]["empty"].update(sha256="../../outside")),
        rewritten(lambda manifest: manifest.update(key="cd" * 32)),
        rewritten(lambda manifest: manifest.update(id="other")),
        rewritten(lambda manifest: manifest.update(kind="engine")),
        rewritten(lambda manifest: None, sealed=False),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_text("[]"),
    ],
)
def test_a_manifest_that_is_not_of_this_artifact_is_refused(
    change: Callable[[Path], object], folder_store: tuple[RemoteStore, Path], tmp_path: Path
) -> None:
    store, root = folder_store
    store.upload(written(tmp_path / "a"), False, SILENT)
    change(root / "artifacts" / f"{KEY}.json")
    with raises_problem("store"):
        store.look(KEY, tmp_path / "looked" / KEY, "finetune", "checkpoint")
    shutil.rmtree(tmp_path / "looked")
    with pytest.raises(InputError) as caught:
        fetched(store, tmp_path / "b")
    assert caught.value.problems[0].key == "store"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "store"]


def test_another_schema_is_refused(folder_store: tuple[RemoteStore, Path]) -> None:
    store, root = folder_store
    store.begin(create=True)
    (root / MARK).write_text('{"schema": 2}')
    with pytest.raises(InputError):
        store.begin(create=False)


def test_what_the_file_system_raises_is_a_failure_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailure):
        connect(f"file://{tmp_path / 'file'}/below").begin(create=True)


def test_a_protocol_without_its_package_is_one_line() -> None:
    for url in ("nothing://a", "dropbox://a"):
        with pytest.raises(InputError) as caught:
            connect(url)
        assert caught.value.problems[0].key == "store"
