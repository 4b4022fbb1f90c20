"""Whole runs that share a store at s3://, against the server of moto; needs `pip install s3fs 'moto[server]'`.

What is killed runs on the command line. Whatever goes on to its end does so in the process of the tests, which has loaded its libraries.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from compress.commands.plan import Plan, plan
from compress.events.progress import EventProgress
from compress.events.stdout import EventStream
from compress.pipeline import run
from compress.recipe import check
from foundation.artifacts.run_folder import open_run
from tests.s3_server import SECRET, s3_server
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("engines_inside", "no_clocks")]

ROOT = Path(__file__).resolve().parents[3]
RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["onnxruntime"], "batch_sizes": [1]},
    "stages": [
        {"finetune": {"epochs": 0.05, "learning_rate": 1e-3}},
        {"quantize": {"calibration": {"rows": 32}}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ],
}
IDS = ["model", "finetune", "evaluate-finetune", "quantize", "evaluate-quantize", "export", "latency", "triton_repo"]
Event = Mapping[str, Any]


class Machine:
    """A run folder and a cache folder of its own.

    Args:
        root: Where these are.
        url: URL of the store.
    """

    def __init__(self, root: Path, url: str) -> None:
        root.mkdir()
        self.run, self._file = root / "run", root / "recipe.yaml"
        recipe = {**RAW, "store": url}
        self._file.write_text(yaml.safe_dump(recipe))
        self._recipe, self._environment = check(recipe), {"XDG_CACHE_HOME": str(root / "cache")}

    def plan(self) -> Plan:
        """Plans the run."""
        with patch.dict(os.environ, self._environment):
            return plan(self._recipe, self.run)

    def killed(self, at: Callable[[Event], bool]) -> list[Event]:
        """Runs `compress run` until SIGKILL at the first event that `at` is true for; returns the events."""
        command = [sys.executable, "-m", "cli", "run", str(self._file), "--out", str(self.run), "--json"]
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = list[Event]()
            for line in process.stdout:
                found.append(json.loads(line))
                if at(found[-1]):
                    process.kill()
                    return found
        raise AssertionError(f"it ended before it was to be killed: {found[-3:]}")

    def events(self) -> list[Event]:
        """Runs to the end; returns the events."""
        stream = io.BytesIO()
        with patch.dict(os.environ, self._environment):
            run(self._recipe, self.run, progress=EventProgress(EventStream(stream)))
        return [json.loads(line) for line in stream.getvalue().splitlines()]


def finished(events: list[Event]) -> dict[str, bool]:
    """Returns whether each finished stage was cached."""
    return {event["stage"]: event["cached"] for event in events if event["event"] == "stage_finished"}


def stored(found: Plan) -> list[str]:
    """Returns the steps that the store gives."""
    return [step.id for step in found.steps if step.stored]


def at(kind: str, stage: str, start: str = "") -> Callable[[Event], bool]:
    """Returns what is true for an event of a stage whose line begins so."""
    return lambda event: (event["event"], event.get("stage")) == (kind, stage) and event.get("message", "").startswith(start)


@pytest.fixture
def url() -> Iterator[str]:
    with s3_server() as url:
        yield url


def test_a_second_machine_takes_everything_from_s3_although_both_are_killed_in_between(url: str, tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)
    before_its_upload = at("log", "quantize", "quantize: done")
    assert finished(first.killed(before_its_upload)) == dict.fromkeys(IDS[:3], False)
    shared = second.plan()
    assert stored(shared) == IDS[:3]
    assert f"store {url}: 3 of" in shared.text
    assert finished(first.events()) == {name: name in IDS[:4] for name in IDS}
    assert finished(second.killed(at("stage_started", "quantize"))) == dict.fromkeys(IDS[:3], True)
    partly = second.plan()
    assert [step.id for step in partly.steps if step.cached and not step.stored] == IDS[:3]
    assert stored(partly) == IDS[3:]
    again = second.events()
    assert finished(again) == dict.fromkeys(IDS, True)
    fetched = [event["message"] for event in again if event["event"] == "log" and f"fetched from {url}" in event["message"]]
    assert [message.partition(":")[0] for message in fetched] == IDS[3:]
    runs = [open_run(machine.run) for machine in (first, second)]
    assert runs[0].artifacts.keys() == runs[1].artifacts.keys()
    for name, artifact in runs[0].artifacts.items():
        assert artifact.manifest == runs[1].artifacts[name].manifest
    reports = [json.loads((machine.run / "report.json").read_text()) for machine in (first, second)]
    assert reports[0]["variants"] == reports[1]["variants"]
    kept = [path for path in (tmp_path / "b").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert kept == [], "credentials stay in the environment"
