"""`compress run --json` as a command: stopped and resumed, in several processes, without a reader."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compress.events.test_events import checked
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[3]
RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [{"finetune": {"epochs": 0.2, "learning_rate": 1e-3}}, {"export": {}}],
}
STAGES = ["model", "finetune", "evaluate-finetune", "export", "latency"]


def command(recipe: Path, folder: Path, *options: str) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-m", "cli", "run", str(recipe), "--out", str(folder), "--json", *options]
    return subprocess.Popen(arguments, cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield checked(line)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RAW))
    return path


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_command_says_so_and_its_resumption_what_is_cached(
    number: signal.Signals, status: int, recipe: Path, tmp_path: Path
) -> None:
    process, seen = command(recipe, tmp_path / "run"), list[dict[str, Any]]()
    for event in lines(process):
        seen.append(event)
        if event["event"] == "run_started":
            assert event["process"] == process.pid
        if (event["event"], event.get("stage")) == ("stage_finished", "finetune"):
            process.send_signal(number)
    assert process.wait() == status
    assert [event["event"] for event in seen[-2:]] == ["error", "run_finished"]
    assert (seen[-2]["kind"], seen[-1]["exit_status"]) == ("stopped", status)
    again = command(recipe, tmp_path / "run")
    found = list(lines(again))
    assert again.wait() in (0, 3, 4)
    cached = {event["stage"]: event["cached"] for event in found if event["event"] == "stage_finished"}
    assert list(cached) == STAGES
    (timed,) = (event["latency"] for event in found if event["event"] == "figures" and event["stage"] == "latency" and "latency" in event)
    assert {row["engine"] for row in timed} >= {"torch", "openvino"}
    assert all(row["p50_ms"] > 0 for row in timed)
    assert cached["model"]
    assert cached["finetune"]
    assert not cached["latency"]
    last = found[-1]
    assert last["exit_status"] == again.returncode
    assert json.loads(Path(last["result"]["report"]).read_text())["name"] == "tiny"
    assert last["result"]["speedup"] > 0


def test_of_several_processes_the_first_one_writes(recipe: Path, tmp_path: Path) -> None:
    process = command(recipe, tmp_path / "run", "--processes", "2")
    found = list(lines(process))
    assert process.wait() in (0, 3, 4)
    assert [event["stage"] for event in found if event["event"] == "stage_finished"] == STAGES
    assert [event["event"] for event in found].count("run_finished") == 1
    assert found[-1]["exit_status"] == process.returncode


def test_a_reader_that_goes_away_stops_the_run(recipe: Path, tmp_path: Path) -> None:
    process = command(recipe, tmp_path / "run")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 2
    ours = [line for line in process.stderr.read().splitlines() if line.startswith("standard output: ")]
    assert len(ours) == 1
