"""A whole run in W&B: what a session holds, by a stand-in for the package, and in slow tests as the package writes it."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import plan
from compress.commands.track import track
from compress.pipeline import run
from compress.recipe import Recipe, check
from compress.report.model.contents import Contents
from compress.track.names import figures
from compress.track.note import WandbNote, read_note
from foundation.artifacts import document
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from tests.compress.track.stand_in import Session, StandIn, install
from tests.compress.track.tiny_run import RAW, STEPS

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside", "no_clocks")]

SILENT = ConsoleProgress("silent")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch)


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


def recipe(**more: Any) -> Recipe:
    return check({**RAW, "track": {"wandb": "team/tiny"}, **more})


def expected(folder: Path) -> dict[str, object]:
    """Returns every figure and text of the report of a run."""
    flat = figures(document.read(Contents, folder / "report.json"))
    return {**flat.numbers, **flat.texts}


def check_finished(session: Session, folder: Path) -> None:
    assert session.exit_code == 0
    assert expected(folder).items() <= session.summary.items()
    assert {f"stages/{step}/seconds" for step in STEPS} <= session.summary.keys()
    report, model = session.artifacts
    assert (report.name, report.type, model.name, model.type) == ("tiny-report", "report", "tiny-model", "model")
    assert report.files.keys() == {"report.json", "report.html"}
    assert all(file.read_bytes() == (folder / name).read_bytes() for name, file in report.files.items())
    assert all(folder / "wandb" in file.parents for file in report.files.values()), "the next run replaces the report of the folder"
    assert any(name.endswith("openvino.xml") for name in model.files)
    assert all(file.is_file() for file in model.files.values())


def test_a_run_and_its_repetition_are_one_run(wandb: StandIn, folder: Path) -> None:
    outcome = run(recipe(), folder, progress=SILENT)
    assert all(stage.cached for stage in outcome.contents.stages), "track is no part of a cache key"
    [session] = wandb.sessions
    check_finished(session, folder)
    assert len(expected(folder)) > 200
    given = session.arguments
    assert (given["entity"], given["project"], given["name"]) == ("team", "tiny", "tiny")
    assert (given["mode"], given["resume"]) == ("offline", "allow")
    assert given["dir"] == str(folder)
    assert given["config"]["stages/finetune/learning_rate"] == "0.001"
    assert not any(key.startswith("track") for key in given["config"])
    run(recipe(), folder, progress=SILENT)
    first, second = wandb.sessions
    assert first.arguments["id"] == second.arguments["id"], "wandb sync adds the second session to the run of the first one"
    check_finished(second, folder)
    assert wandb.torn_down == 2, "no process of wandb runs while engines are timed"
    assert WandbNote.FILE not in {entry.path for entry in outcome.contents.integrity.files}
    run(recipe(track={"wandb": "team/tiny", "model": False}, goals={"max_drop": 0.5}), folder, progress=SILENT)
    assert wandb.sessions[-1].arguments["id"] != first.arguments["id"], "another recipe is another run"
    assert [artifact.type for artifact in wandb.sessions[-1].artifacts] == ["report"]


def test_how_a_run_failed_and_what_it_has_done(wandb: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((ValueError("no room"), 1), (KeyboardInterrupt(), 255)):

        def fail(*arguments: Any, raised: BaseException = error, **more: Any) -> None:
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr("export.export.Export.run", fail)
            with pytest.raises(type(error)):
                run(recipe(), folder, start="export", progress=SILENT)
        session = wandb.sessions[-1]
        assert (session.exit_code, session.artifacts) == (code, [])
        assert {"stages/finetune/seconds"} <= session.summary.keys()
        assert "stages/export/seconds" not in session.summary
    run(recipe(), folder, progress=SILENT)
    check_finished(wandb.sessions[-1], folder)
    assert len({session.arguments["id"] for session in wandb.sessions}) == 1


def test_what_is_missing_is_sent_later_and_nothing_twice(
    wandb: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    wandb.away = True
    run(recipe(), folder, progress=ConsoleProgress("quiet"))
    assert "compress track" in capsys.readouterr().err
    with pytest.raises(InputError) as caught:
        track(folder, progress=SILENT)
    assert caught.value.problems[0].key == "track.wandb"
    wandb.away = False
    line = track(folder, progress=SILENT)
    assert track(folder, progress=SILENT) == line
    [session] = wandb.sessions
    check_finished(session, folder)
    assert (session.arguments["mode"], str(session.arguments["id"]) in line) == ("online", True)
    text = {"recipe.lock.yaml", "log.txt", "report.json", "report.html", WandbNote.FILE, "chain.json"}
    assert not [name for name in text if "secret-key" in (folder / name).read_text(encoding="utf-8")]
    assert "secret-key" not in line + repr(session.arguments)


def test_a_finished_run_can_be_sent_and_a_killed_one_ends_as_killed(wandb: StandIn, folder: Path) -> None:
    track(folder, wandb="later", progress=SILENT)
    [session] = wandb.sessions
    check_finished(session, folder)
    assert (session.arguments["entity"], session.arguments["project"]) == (None, "later")
    note = json.loads((folder / WandbNote.FILE).read_text(encoding="utf-8"))
    note["run"] |= {"status": "RUNNING", "sent": None, "ended_ms": None}
    (folder / WandbNote.FILE).write_text(json.dumps(note), encoding="utf-8")
    track(folder, progress=SILENT)
    assert wandb.sessions[-1].exit_code == 255


def test_a_disabled_wandb_writes_nothing(wandb: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    track(folder, wandb="tiny", progress=SILENT)
    assert wandb.sessions == []
    assert not (folder / "wandb").exists()
    monkeypatch.delenv("WANDB_MODE")
    track(folder, progress=SILENT)
    check_finished(wandb.sessions[-1], folder)


@pytest.mark.parametrize(
    ("variables", "key", "word"),
    [
        ({}, "track.wandb", "[wandb]"),
        ({"WANDB_MODE": "shared"}, "WANDB_MODE", "offline"),
        ({"WANDB_MODE": "online"}, "WANDB_MODE", "WANDB_API_KEY"),
    ],
)
def test_what_is_missing_is_named_before_anything_runs(
    variables: dict[str, str], key: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    if not variables:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("compress.pipeline.prepare", lambda *arguments: pytest.fail("nothing may run"))
    for work in (lambda: plan(recipe(), tmp_path / "a"), lambda: run(recipe(), tmp_path / "a", progress=SILENT)):
        with pytest.raises(InputError) as caught:
            work()
        [problem] = caught.value.problems
        assert problem.key == key
        assert word in str(problem)
    assert read_note(tmp_path / "a", WandbNote) is None


def records(file: Path) -> Iterator[Any]:
    """Yields the records of a session. wandb 0.31 has no reader of its own files in Python: they are in LevelDB's log format (blocks of
    32 KiB of records with checksum, length and kind) after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


@pytest.mark.slow
def test_sessions_as_wandb_writes_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(folder.parent / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(folder.parent / "data"))
    for _ in range(2):
        run(recipe(), folder, progress=SILENT)
    note = read_note(folder, WandbNote)
    assert note is not None
    files = sorted((folder / "wandb").glob(f"offline-run-*-{note.run.id}/run-{note.run.id}.wandb"))
    assert len(files) == 2
    assert not [file for file in (folder.parent / "data").rglob("*") if file.is_file()], "nothing is copied out of the run folder"
    for file in files:
        by_kind: dict[str, list[Any]] = {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            by_kind.setdefault(kind, []).append(getattr(record, kind))
        [opened], [ended] = by_kind["run"], by_kind["exit"]
        assert (opened.run_id, opened.project, opened.entity, opened.display_name) == (note.run.id, "tiny", "team", "tiny")
        assert opened.resume, "wandb sync continues the run that the server has"
        assert ended.exit_code == 0
        config = {entry.key: json.loads(entry.value_json) for entry in opened.config.update}
        assert config["stages/finetune/learning_rate"] == "0.001"
        summary = {
            entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for one in by_kind["summary"] for entry in one.update
        }
        wanted = expected(folder) if file == files[-1] else {key: summary.get(key) for key in ("variants/finetune/parameters",)}
        assert wanted.items() <= summary.items()
        assert "history" not in by_kind, "its steps would be there once for each session"
        assert [one.type for one in by_kind["artifact"]] == ["report", "model"]
        contents = {entry.path: Path(entry.local_path) for one in by_kind["artifact"] for entry in one.manifest.contents}
        assert {"report.json", "report.html"} <= contents.keys()
        assert all(path.is_absolute() and path.is_file() for path in contents.values())
        assert not by_kind.keys() & {"output", "output_raw", "stats", "environment"}
        assert os.uname().nodename not in str(opened)
