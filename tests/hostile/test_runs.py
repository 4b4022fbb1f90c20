"""Run folders that were damaged or edited: every command names the file and ends with status 2."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from cli import app
from foundation.artifacts import artifact
from foundation.artifacts.chain import CHAIN
from foundation.artifacts.run_folder import LOCK_FILE
from tests.hostile.finished_runs import write_run

VERBS = ("report", "verify", "serve", "bench")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))


def compress(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert "internal error" not in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stderr


def step(run: Path, name: str) -> Path:
    return next((run / "stages").glob(f"{name}-????????"))


@pytest.mark.whole
def test_the_run_is_good_as_it_is(run: Path) -> None:
    assert compress("report", str(run))[0] in (0, 3, 4)
    assert compress("verify", str(run)) == (0, "")
    assert "no model repository" in compress("serve", str(run))[1]
    assert "no engines to measure" in compress("bench", str(run))[1]
    assert compress("clean", str(run)) == (0, "")


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Returns a function that changes the contents of the lock file."""

    def edit(file: Path) -> None:
        document = yaml.safe_load(file.read_text())
        change(document)
        file.write_text(yaml.safe_dump(document))

    return edit


def wrote(content: bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(content)

    return write


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


LOCKS: list[tuple[str, Callable[[Path], Any]]] = [
    ("missing", Path.unlink),
    ("a folder", folder),
    ("a FIFO", fifo),
    *(
        (f"content {number}", wrote(content))
        for number, content in enumerate(
            (b"", b"\xff", b"7", b"[]", b"{", b"a: !!python/name:os.system x", b"a: &a [*a]", b"x" * 10_000_001)
        )
    ),
    *(
        (f"without {key}", edited(lambda document, key=key: document.pop(key)))  # type: ignore[misc]
        for key in ("recipe", "stages", "environment")
    ),
    *(
        (f"{key} {number}", edited(lambda document, key=key, value=value: document.update({key: value})))  # type: ignore[misc]
        for key in ("recipe", "stages", "environment")
        for number, value in enumerate((None, 7, "x", [7], {"a": 1}))
    ),
    *(
        (f"{key} of a step {number}", edited(lambda document, key=key, value=value: document["stages"][1].update({key: value})))  # type: ignore[misc]
        for key, values in {
            "id": (None, 7, "model", ["x"]),
            "artifact": (None, 7, "absent", "/etc", "../..", "stages/../..", "stages/absent", "stages/a\x00b"),
            "digest": (None, 7),
            "cached": (None, "x"),
            "seconds": (None, "x", True),
        }.items()
        for number, value in enumerate(values)
    ),
    ("no steps", edited(lambda document: document.update(stages=[]))),
    ("no evaluation", edited(lambda document: document["stages"].pop())),
    ("a step that is none", edited(lambda document: document["stages"].append(7))),
    ("no hardware", edited(lambda document: document["environment"].pop("hardware"))),
    ("an unknown task", edited(lambda document: document["recipe"]["model"].update(task="x"))),
    ("an unknown key", edited(lambda document: document["recipe"].update(x=1))),
    ("no goals", edited(lambda document: document["recipe"].update(goals=7))),
    ("no target", edited(lambda document: document["recipe"].update(target=[]))),
]


@pytest.mark.parametrize("damage", [damage for _, damage in LOCKS], ids=[name for name, _ in LOCKS])
def test_a_damaged_lock_file(damage: Callable[[Path], Any], run: Path) -> None:
    damage(run / LOCK_FILE)
    for verb in VERBS:
        status, lines = compress(verb, str(run))
        assert status == 2
        assert LOCK_FILE in lines or "manifest.json" in lines, lines


def rewritten(sealed: bool, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Returns a function that changes a manifest; `sealed` leaves out the digest, as manifests of earlier versions do."""

    def edit(file: Path) -> None:
        manifest = json.loads(file.read_text())
        change(manifest)
        if not sealed:
            manifest.pop(artifact.SEAL)
        file.write_text(json.dumps(manifest))

    return edit


MANIFESTS: list[tuple[str, Callable[[Path], Any]]] = [
    ("missing", Path.unlink),
    ("a folder", folder),
    ("a FIFO", fifo),
    *(
        (f"content {number}", wrote(content))
        for number, content in enumerate((b"", b"\xff", b"7", b"[]", b"{", b"[" * 100_000, b'{"schema": 1}'))
    ),
    ("another figure", rewritten(True, lambda manifest: manifest["metrics"].update(n=7))),
    ("no figures", rewritten(True, lambda manifest: manifest.pop("metrics"))),
    ("NaN", rewritten(True, lambda manifest: manifest.update(seconds=float("nan")))),
    *(
        (f"{key} {number}", rewritten(False, lambda manifest, key=key, value=value: manifest.update({key: value})))  # type: ignore[misc]
        for key, values in {
            "schema": (2, None, "1", []),
            "id": (7, None),
            "kind": ("x", 7, []),
            "key": (None, []),
            "digest": (None, "0" * 64),
            "parents": (None, 7, [7]),
            "files": (None, 7, [], {"x": 7}, {"x": {}}, {"x": {"sha256": 7, "size": 1}}, {"x": {"sha256": "0", "size": "1"}}, {}),
        }.items()
        for number, value in enumerate(values)
    ),
]


@pytest.mark.parametrize("damage", [damage for _, damage in MANIFESTS], ids=[name for name, _ in MANIFESTS])
def test_a_damaged_manifest(damage: Callable[[Path], Any], run: Path) -> None:
    damage(step(run, "evaluate-finetune") / artifact.MANIFEST)
    for verb in ("verify", "serve", "bench"):
        status, lines = compress(verb, str(run))
        assert status == 2
        assert "evaluate-finetune" in lines or verb != "verify", lines
    assert compress("report", str(run))[0] == 2


PREDICTIONS: list[tuple[str, Callable[[Path], Any]]] = [
    ("missing", Path.unlink),
    ("a FIFO", fifo),
    ("a folder", folder),
    ("empty", wrote(b"")),
    ("text", wrote(b"no tensors")),
    ("a header alone", wrote((10**15).to_bytes(8, "little"))),
    ("other tensors", lambda file: save_file({"x": np.zeros(3, np.float32)}, file)),
    ("another shape", lambda file: save_file({"logits": np.zeros((2, 3, 4, 5), np.float32), "labels": np.zeros(2, np.int64)}, file)),
    ("fewer labels", lambda file: save_file({**load_file(file), "labels": np.zeros(2, np.int64)}, file)),
    ("labels beyond the classes", lambda file: save_file({**load_file(file), "labels": np.full(12, 10**9, np.int64)}, file)),
    ("no rows", lambda file: save_file({"logits": np.zeros((0, 10), np.float32), "labels": np.zeros(0, np.int64)}, file)),
]


@pytest.mark.parametrize("damage", [damage for _, damage in PREDICTIONS], ids=[name for name, _ in PREDICTIONS])
def test_damaged_predictions(damage: Callable[[Path], Any], run: Path) -> None:
    file = step(run, "evaluate-finetune") / "torch.safetensors"
    damage(file)
    status, lines = compress("verify", str(run))
    assert (status, str(file) in lines) == (2, True)
    status, lines = compress("report", str(run))
    assert (status, str(file) in lines) == (2, True)


GOLDEN: list[tuple[str, Callable[[Path], Any]]] = [
    *PREDICTIONS[:6],
    ("no rows", lambda file: save_file({"bytes": np.zeros(0, np.uint8), "lengths": np.zeros((0, 1), np.int64)}, file, {"kind": "text"})),
    ("no kind", lambda file: save_file({"bytes": np.zeros(3, np.uint8), "lengths": np.full((3, 1), 1, np.int64)}, file)),
    (
        "lengths below 0",
        lambda file: save_file({"bytes": np.zeros(3, np.uint8), "lengths": np.full(3, -1, np.int64)}, file, {"kind": "text"}),
    ),
    (
        "no text",
        lambda file: save_file({"bytes": np.full(3, 255, np.uint8), "lengths": np.full((1, 1), 3, np.int64)}, file, {"kind": "text"}),
    ),
    (
        "fewer logits",
        lambda file: save_file(load_file(file) | {"logits.finetune.torch": np.zeros((1, 10), np.float32)}, file, {"kind": "text"}),
    ),
]


@pytest.mark.parametrize("damage", [damage for _, damage in GOLDEN], ids=[name for name, _ in GOLDEN])
def test_damaged_golden_rows(damage: Callable[[Path], Any], run: Path) -> None:
    damage(run / "golden.safetensors")
    status, lines = compress("verify", str(run))
    assert (status, "golden.safetensors" in lines) == (2, True)


@pytest.mark.parametrize("content", [b"", b"\xff", b"7", b"[]", b'{"warnings": 7}', b"[" * 100_000, b'{"warnings": [{}]}'])
def test_a_damaged_report_is_named_and_written_again(content: bytes, run: Path) -> None:
    (run / "report.json").write_bytes(content)
    status, lines = compress("verify", str(run))
    assert (status, "report.json: " in lines) == (2, True)
    assert compress("report", str(run))[0] in (0, 3, 4)
    assert json.loads((run / "report.json").read_text())["name"] == "tiny"
    (run / "flips.jsonl").write_bytes(b"\xff\n" + content)
    status, lines = compress("report", str(run))
    assert (status, "flips.jsonl: changed since the run finished" in lines) == (2, True)


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"7", b"[]", b"{}", b'{"files": 7}', b'{"files": [7]}', b"[" * 100_000])
def test_a_damaged_chain(content: bytes | None, run: Path) -> None:
    (run / CHAIN).unlink()
    if content is not None:
        (run / CHAIN).write_bytes(content)
    for verb in ("report", "verify", "serve"):
        status, lines = compress(verb, str(run))
        assert (status, f"{CHAIN}: " in lines) == (2, True), lines


@pytest.mark.parametrize("content", [b"", b"\xff", b"7", b"{", b'{"schema": 7}', b"[" * 100_000])
def test_a_damaged_report_is_refused_by_the_api(content: bytes, run: Path) -> None:
    from compress.api import InputError, Report

    (run / "report.json").write_bytes(content)
    with pytest.raises(InputError, match=r"report.json"):
        Report.load(run)


def test_what_does_not_belong_into_the_folder_of_stages_is_cleaned_away(run: Path) -> None:
    (run / "stages" / "a-file").write_text("x")
    (run / "stages" / "a-link").symlink_to("/etc")
    (run / "stages" / "old-12345678").mkdir()
    assert compress("clean", str(run)) == (0, "")
    assert sorted(path.name[:-9] for path in (run / "stages").iterdir()) == ["evaluate-finetune", "finetune", "model"]
    assert Path("/etc").is_dir()


@pytest.mark.parametrize("name", ["stages", ".lock", "log.txt", "recipe.lock.yaml"])
def test_what_is_in_the_way_of_a_run_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny_recipes import tiny_vit

    monkeypatch.setattr("compress.pipeline.advance", lambda *arguments: pytest.fail("no step may run"))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_vit("tiny") | {"stages": [{"finetune": {"epochs": 1}}]}))
    (tmp_path / "run").mkdir()
    if name in (".lock", "log.txt"):
        (tmp_path / "run" / ".lock").touch()
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).mkdir()
        status, lines = compress("run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"))
        assert (status, f"{name}: Is a directory; remove what is in the way" in lines) == (2, True)
    else:
        (tmp_path / "run" / name).touch()
        status, lines = compress("run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"))
        assert (status, "not empty and not a run folder" in lines) == (2, True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(27, "File too large", "/x/model.safetensors"), "/x/model.safetensors: File too large; raise the limit of the file size"),
        (OSError(36, "File name too long", b"/x"), "/x: File name too long; give a shorter path"),
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory; leave the folders of a run alone"),
        (OSError(24, "Too many open files"), "the run folder: Too many open files; raise the limit of open files"),
        (MemoryError(), "this process: Cannot allocate memory; free some memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "Cannot allocate memory"),
        (RuntimeError("I/O error: File too large (os error 27)"), "File too large; raise the limit"),
    ],
    ids=[str(number) for number in range(7)],
)
def test_what_the_machine_refuses_is_no_internal_error(error: Exception, words: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr("compress.commands.verify.rebuild", fail)
    status, lines = compress("report", str(run))
    assert (status, words in lines) == (2, True), lines
