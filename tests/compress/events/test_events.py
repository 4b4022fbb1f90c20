"""Events of a run: each is one line of strict JSON that its model and the schema know, whatever was written between them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from cli import app
from compress.commands.exit_status import STATUSES
from compress.commands.run_json import RunJson
from compress.events.model import ADAPTER, EVENTS, Event, Figures, Log, RunFinished, name_of
from compress.events.progress import SECONDS_BETWEEN_EVENTS, EventProgress
from compress.events.stdout import EventStream, Unread
from compress.pipeline import Outcome
from docs.generate import sections
from foundation.artifacts.timed import VariantTiming, write_latency
from foundation.core.errors import InputError, Problem
from foundation.core.progress import SILENT_SECONDS
from tests.compress.report.test_goals import make_report
from tests.plain_reports import contents, judge

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "docs" / "events.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Closed:
    """A stream that nobody reads."""

    def write(self, data: bytes, /) -> int:
        raise BrokenPipeError


class Narrow(BytesIO):
    """A stream that takes few bytes at once, and is interrupted by a signal in its third call."""

    calls = 0

    def write(self, data: Any, /) -> int:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return super().write(bytes(data)[:7])


def read(stream: BytesIO) -> list[dict[str, Any]]:
    """Returns the events of a stream, each checked with the schema and read by its model."""
    return list(map(checked, stream.getvalue().decode("ascii").splitlines()))


def checked(line: str) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    VALIDATOR.validate(plain)
    event = ADAPTER.validate_json(line)
    assert name_of(type(event)) == plain["event"]
    assert not event.model_extra
    return plain


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(event["time"].endswith("Z") for event in events)
    return [{key: value for key, value in event.items() if key != "time"} for event in events]


@pytest.fixture
def stream() -> BytesIO:
    return BytesIO()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(stream: BytesIO, clock: Clock) -> EventProgress:
    return EventProgress(EventStream(stream), clock=clock)


@pytest.mark.parametrize("event", EVENTS)
def test_every_key_has_a_meaning_and_every_event_a_name(event: type[Event]) -> None:
    assert name_of(event) in SCHEMA["discriminator"]["mapping"]
    assert [key.name for section in sections(event) for key in section.keys if not key.meaning.endswith(".")] == []


def test_numbers_have_units_in_their_keys() -> None:
    counts = {"schema", "process", "number", "count", "done", "total", "exit_status"}
    shares = {"steps_per_second", "metric_before", "metric_after", "speedup"}
    own = {key.name: key.type for event in EVENTS for section in sections(event) for key in section.keys if not is_of_report(section.path)}
    numbers = {name for name, kind in own.items() if kind in ("number", "integer")} - counts - shares
    assert numbers == {"elapsed_seconds", "remaining_seconds", "seconds", "size_bytes", "baseline_size_bytes"}


def is_of_report(path: str) -> bool:
    """Whether a section of an event is one of report.json, too."""
    return path.startswith(("latency", "result.served", "result.goals"))


def test_a_line_is_strict_json_in_ascii_whatever_it_holds() -> None:
    figures = {"loss": math.nan, "terms": [math.inf, 1.5], "deep": {"low": -math.inf, "n": 3}, "none": None}
    event = Figures(stage="finetune", figures=figures)
    assert checked(event.line())["figures"] == {"loss": None, "terms": [None, 1.5], "deep": {"low": None, "n": 3}} | none_of(event)
    line = Log(message="a\nb \u2028 é \udc80").line()
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == "a\nb \u2028 é \udc80"


def none_of(event: Event) -> Mapping[str, None]:
    """A figure that is null stays, or is left out: the two mean the same."""
    return {"none": None} if "none" in json.loads(event.line())["figures"] else {}


def test_a_bar_writes_its_first_and_last_step_and_one_a_second(
    progress: EventProgress, stream: BytesIO, clock: Clock, tmp_path: Path
) -> None:
    progress.file = tmp_path / "log.txt"
    with progress.bar("predict", 100) as advance:
        for _ in range(100):
            clock.now += 0.25
            advance(1)
    events = read(stream)
    assert {event["event"] for event in events} == {"progress"}
    assert [event["done"] for event in events] == [1, *range(5, 100, 4), 100]
    assert events[4] == {
        "time": events[4]["time"],
        "event": "progress",
        "label": "predict",
        "done": 17,
        "total": 100,
        "elapsed_seconds": 4.25,
        "steps_per_second": 4.0,
        "remaining_seconds": pytest.approx(83 / 4),
    }
    assert SECONDS_BETWEEN_EVENTS == 1.0
    assert [line.split(" ", 1)[1] for line in progress.file.read_text().splitlines()] == [
        "  predict: 40/100, 4.0/s, 15 s left",
        "  predict: 80/100, 4.0/s, 5 s left",
    ]


def test_a_stage_has_its_place_and_what_is_written_within_names_it(progress: EventProgress, stream: BytesIO, tmp_path: Path) -> None:
    progress.file = tmp_path / "log.txt"
    progress.log("demo: loading libraries")
    progress.run_started("demo", tmp_path, ["model", "finetune"])
    progress.stage_started("finetune")
    with progress.bar("finetune", 3) as advance:
        progress.tick("finetune", "  finetune: epoch 1, loss 0.5", {"epoch": 1, "loss": 0.5})
        advance(3)
    progress.warn("a layer saturates")
    progress.stage_finished("finetune", tmp_path, {"rows": 3}, 1.5, cached=True)
    progress.log("report")
    first, second, *events = without_times(read(stream))
    assert first == {"event": "log", "message": "demo: loading libraries"}
    assert second["event"] == "run_started"
    assert (second["schema"], second["process"], second["name"], second["folder"]) == (1, os.getpid(), "demo", str(tmp_path))
    assert second["stages"] == ["model", "finetune"]
    assert events == [
        {"event": "stage_started", "stage": "finetune", "number": 2, "count": 2},
        {"event": "figures", "stage": "finetune", "label": "finetune", "figures": {"epoch": 1, "loss": 0.5}},
        {"event": "progress", "stage": "finetune", "label": "finetune", "done": 3, "total": 3, "elapsed_seconds": 0.0},
        {"event": "warning", "stage": "finetune", "message": "a layer saturates"},
        {"event": "figures", "stage": "finetune", "figures": {"rows": 3}},
        {"event": "stage_finished", "stage": "finetune", "cached": True, "seconds": 1.5, "folder": str(tmp_path)},
        {"event": "log", "message": "report"},
    ]
    assert progress.warnings == ["a layer saturates"]
    assert len(progress.file.read_text().splitlines()) == 4


def test_latencies_stand_in_the_figures_of_their_stage(progress: EventProgress, stream: BytesIO, tmp_path: Path) -> None:
    rows = [VariantTiming(variant="quantize", engine="openvino", batch=1, sequence=None, p50_ms=2.5, turns_ms=(2.5, None))]
    write_latency(tmp_path, rows)
    progress.run_started("demo", tmp_path, ["latency"])
    progress.stage_started("latency")
    progress.stage_finished("latency", tmp_path, {"rows": 1}, 1.0, cached=False)
    (figures,) = (event for event in read(stream) if event["event"] == "figures")
    assert figures["figures"] == {"rows": 1}
    (row,) = figures["latency"]
    assert (row["variant"], row["engine"], row["batch"], row["p50_ms"], row["turns_ms"]) == ("quantize", "openvino", 1, 2.5, [2.5, None])
    assert "sequence" not in row


def test_silence_is_broken_with_what_runs(progress: EventProgress, stream: BytesIO, clock: Clock) -> None:
    with progress.alive("export"):
        clock.now += SILENT_SECONDS - 1
        progress.speak_if_silent()
        assert stream.getvalue() == b""
        clock.now += 1
        progress.speak_if_silent()
        progress.speak_if_silent()
    assert without_times(read(stream)) == [{"event": "progress", "label": "export", "elapsed_seconds": SILENT_SECONDS}]


def test_quiet_leaves_out_log_and_progress(stream: BytesIO, clock: Clock) -> None:
    progress = EventProgress(EventStream(stream), quiet=True, clock=clock)
    progress.log("a line")
    with progress.bar("train", 2) as advance:
        progress.tick("train", "no numbers")
        progress.tick("train", "a number", {"loss": 1.0})
        advance(2)
    progress.warn("beware")
    assert [event["event"] for event in read(stream)] == ["figures", "warning"]


def test_nothing_reaches_the_terminal(progress: EventProgress, capfd: pytest.CaptureFixture[str]) -> None:
    progress.log("a line")
    progress.warn("a warning")
    with progress.bar("train", 2) as advance:
        progress.tick("train", "epoch 1")
        advance(2)
    assert capfd.readouterr() == ("", "")


def test_an_interrupted_line_is_completed_before_the_next_one() -> None:
    narrow = Narrow()
    events = EventStream(narrow)
    with pytest.raises(KeyboardInterrupt):
        events.write(Log(message="a long line that is cut"))
    events.write(RunFinished(exit_status=130))
    assert [event["event"] for event in read(narrow)] == ["log", "run_finished"]


def test_a_reader_that_is_gone_stops_the_run_with_a_line() -> None:
    events = EventStream(Closed())
    with pytest.raises(Unread) as caught:
        EventProgress(events).log("a line")
    assert isinstance(caught.value, InputError)
    assert caught.value.problems[0].key == "standard output"
    RunJson(events).ended(2)  # nobody reads how it ended, which is no second error


def answered(monkeypatch: pytest.MonkeyPatch, stream: BytesIO, *arguments: str) -> tuple[int, list[dict[str, Any]], str, str]:
    """Returns what a command answers whose events go to a stream: exit status, events, standard output and error."""
    monkeypatch.setattr(RunJson, "on_stdout", classmethod(lambda cls, first: cls(EventStream(stream), first)))
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, read(stream), result.stdout, result.stderr


@pytest.mark.parametrize(("limit", "status"), [(0.01, 0), (0.001, 3)])
def test_the_last_event_has_exit_status_and_outcome(limit: float, status: int, stream: BytesIO, monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report()
    outcome = Outcome(Path("runs/x"), contents({**report, "goals": judge({"max_drop": limit}, report)}))
    monkeypatch.setattr("compress.pipeline.run", lambda *arguments, **options: outcome)
    found, events, out, err = answered(monkeypatch, stream, "run", "quickstart", "--json")
    assert (found, out, err) == (status, "", "")
    assert [event["event"] for event in events] == ["log", "run_finished"]
    last = events[-1]
    assert (last["exit_status"], last["meaning"]) == (status, STATUSES[status])
    result = last["result"]
    assert result["report"] == str(Path("runs/x/report.json").absolute())
    assert result["missed"] == ["max_drop"] * (status // 3)
    assert [goal["limit"] for goal in result["goals"]] == [limit]
    assert result["metric"] == "accuracy"
    assert all(isinstance(result[key], float) for key in ("metric_before", "metric_after", "speedup"))


def test_wrong_input_is_an_error_in_its_parts(stream: BytesIO, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("run", "sst2-minilm-distill", "--json", "--set", "stages.quantize.mode=ptk", "--set", "data.max_lenght=64")
    status, events, out, err = answered(monkeypatch, stream, *arguments)
    assert [event["event"] for event in events] == ["error", "run_finished"]
    error, last = events
    assert (status, last["exit_status"], "result" in last, error["kind"], out) == (2, 2, False, "input", "")
    assert {problem["key"] for problem in error["problems"]} == {"stages.quantize.mode", "data.max_lenght"}
    assert [problem["line"] for problem in error["problems"]] == err.splitlines()
    for problem in error["problems"]:
        assert str(Problem(*(problem[part] for part in ("key", "given", "allowed", "remedy")))) == problem["line"]


@pytest.mark.parametrize(
    ("raised", "kind", "status"),
    [
        (ZeroDivisionError("oops"), "internal", 1),
        (KeyboardInterrupt(), "stopped", 130),
        (OSError(28, "No space left on device"), "machine", 2),
    ],
)
def test_other_ends_have_a_kind(raised: BaseException, kind: str, status: int, stream: BytesIO, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("compress.pipeline.run", fail)
    found, events, _, err = answered(monkeypatch, stream, "run", "quickstart", "--json")
    assert (found, events[-1]["exit_status"], events[-2]["event"], events[-2]["kind"]) == (status, status, "error", kind)
    assert [problem["line"] for problem in events[-2]["problems"]] == err.splitlines()


TAKEN = """
import os, subprocess, sys
from compress.events.model import Log
from compress.events.stdout import EventStream, take_stdout
print("before")
events = EventStream(take_stdout())
events.write(Log(message="one"))
print("python", flush=True)
os.write(1, b"library\\n")
subprocess.run(["echo", "child"])
events.write(Log(message="two"))
"""


@pytest.mark.whole
def test_standard_output_holds_events_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", TAKEN], cwd=ROOT, capture_output=True, text=True, check=True)
    before, *events = ran.stdout.splitlines()
    assert (before, [json.loads(event)["message"] for event in events]) == ("before", ["one", "two"])
    assert sorted(ran.stderr.splitlines()) == ["child", "library", "python"]
