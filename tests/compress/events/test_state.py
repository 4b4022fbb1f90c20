"""The state of a run after its events, and the file that it is read from."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.events import event_file
from compress.events.event_file import EVENTS, claim, is_running, state_of
from compress.events.model import (
    Error,
    Event,
    Figures,
    Log,
    ProblemParts,
    Progress,
    Result,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Warned,
)
from compress.events.state import RunState
from foundation.core.errors import InputError

STARTED: tuple[Event, ...] = (
    RunStarted(name="demo", folder="/runs/demo", process=7, stages=("model", "finetune", "export")),
    StageStarted(stage="model", number=1, count=3),
    StageFinished(stage="model", cached=True, seconds=2.0),
    StageStarted(stage="finetune", number=2, count=3),
    Progress(stage="finetune", label="finetune", done=1, total=4),
    Log(message="a line"),
    Figures(stage="finetune", label="finetune", figures={"loss": 0.5}),
    Warned(stage="finetune", message="beware"),
)


def after(*events: Event) -> RunState:
    state = RunState(folder="/runs/demo")
    for event in (*STARTED, *events):
        state = state.after(event)
    return state


def test_a_run_that_works() -> None:
    state = after()
    assert (state.state, state.name, state.folder, state.process, state.exit_status) == ("running", "demo", "/runs/demo", 7, None)
    assert [(stage.stage, stage.state, stage.seconds) for stage in state.stages] == [
        ("model", "cached", 2.0),
        ("finetune", "running", None),
        ("export", "waiting", None),
    ]
    assert state.progress is not None
    assert (state.progress.done, state.progress.total) == (1, 4)
    assert (state.figures, state.warnings, state.updated) == ({"loss": 0.5}, ("beware",), STARTED[-1].time)


def test_progress_and_figures_belong_to_the_stage_that_runs() -> None:
    state = after(StageFinished(stage="finetune", seconds=3.0), Figures(stage="finetune", figures={"rows": 3}))
    assert (state.progress, state.figures, state.stages[1].state) == (None, None, "done")


def test_ends() -> None:
    finished = after(RunFinished(exit_status=3, meaning="missed", result=Result(missed=("max_drop",))))
    assert (finished.state, finished.exit_status, finished.meaning) == ("finished", 3, "missed")
    assert finished.result is not None
    assert finished.result.missed == ("max_drop",)
    problem = ProblemParts(key="data.path", given="missing")
    failed = after(Error(kind="input", problems=(problem,)), RunFinished(exit_status=2))
    assert (failed.state, failed.problems, failed.exit_status, failed.result) == ("failed", (problem,), 2, None)
    stopped = after(Error(kind="stopped", problems=(problem,)), RunFinished(exit_status=143))
    assert (stopped.state, stopped.exit_status) == ("stopped", 143)
    assert after(RunFinished(exit_status=1)).state == "failed"
    killed = after().killed()
    assert (killed.state, killed.exit_status, killed.progress, len(killed.problems)) == ("failed", None, None, 1)


def test_a_run_works_as_long_as_its_process_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(tmp_path) as file:
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=file)
        file.write(b"".join(event.line().encode() + b"\n" for event in STARTED) + b'{"event": "half')
    assert is_running(tmp_path)  # its starter has closed the file
    assert state_of(tmp_path) == after().with_(folder="/runs/demo")
    monkeypatch.setattr(event_file, "TRIES", 2)
    with pytest.raises(InputError) as caught:
        claim(tmp_path)
    assert caught.value.problems[0].key == str(tmp_path)
    assert state_of(tmp_path).name == "demo"  # who is refused empties nothing
    child.kill()
    child.communicate()
    assert not is_running(tmp_path)
    assert state_of(tmp_path).state == "failed"
    claim(tmp_path).close()
    assert os.stat(tmp_path / EVENTS).st_size == 0


def test_a_reader_does_not_refuse_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path).close()
    with (tmp_path / EVENTS).open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        monkeypatch.setattr("compress.events.event_file.time.sleep", lambda seconds: fcntl.flock(reader, fcntl.LOCK_UN))
        claim(tmp_path).close()


def test_what_is_no_event_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        state_of(tmp_path)
    assert caught.value.problems[0].key == str(tmp_path)
    (tmp_path / EVENTS).write_text('{"event": "log"}\nnothing\n')
    with pytest.raises(InputError) as caught:
        state_of(tmp_path)
    assert caught.value.problems[0].key == f"{tmp_path / EVENTS}, line 2"
