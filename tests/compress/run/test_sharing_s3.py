"""Whole runs of the command line that share a store at s3://, against the server of moto; needs `pip install s3fs 'moto[server]'`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.artifacts.run_folder import open_run
from tests.s3_server import SECRET, s3_server
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[3]
RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["onnxruntime"], "batch_sizes": [1]},
    "stages": [
        {"finetune": {"epochs": 0.2, "learning_rate": 1e-3}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ],
}
IDS = ["model", "finetune", "evaluate-finetune", "quantize", "evaluate-quantize", "export", "latency", "triton_repo"]
Event = Mapping[str, Any]


class Machine:
    """The command line with a folder and a cache folder of its own.

    Args:
        root: Where these are.
        url: URL of the store.
    """

    def __init__(self, root: Path, url: str) -> None:
        root.mkdir()
        self.run = root / "run"
        (root / "recipe.yaml").write_text(yaml.safe_dump({**RAW, "store": url}))
        self._recipe = root / "recipe.yaml"
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache"), "PYTHONPATH": str(ROOT)}

    def start(self, verb: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cli", verb, str(self._recipe), "--out", str(self.run), *more]
        return subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, text=True)

    def plan(self) -> dict[str, list[str]]:
        """Returns the columns of each line of a plan, by its first word."""
        process = self.start("plan")
        text, _ = process.communicate()
        assert process.returncode == 0, text
        return {words[0]: words for words in map(str.split, text.splitlines()) if words}

    def events(self, kill_at: Callable[[Event], bool] = lambda event: False) -> list[Event]:
        """Runs the recipe, until SIGKILL at the first event that `kill_at` is true for; returns the events."""
        process, found = self.start("run", "--json"), list[Event]()
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            if kill_at(found[-1]):
                process.kill()
                process.wait()
                return found
        assert process.wait() in (0, 3, 4), found[-3:]
        assert not kill_at({}), "it ended before it was to be killed"
        return found


def finished(events: list[Event]) -> dict[str, bool]:
    """Returns whether each finished stage was cached."""
    return {event["stage"]: event["cached"] for event in events if event["event"] == "stage_finished"}


def at(kind: str, stage: str, start: str = "") -> Callable[[Event], bool]:
    """Returns what is true for an event of a stage whose line begins so; without an event: true, it has to come."""

    def is_it(event: Event) -> bool:
        return (event["event"], event.get("stage")) == (kind, stage) and event.get("message", "").startswith(start)

    return lambda event: not event or is_it(event)


@pytest.fixture
def url() -> Iterator[str]:
    with s3_server() as url:
        yield url


def test_a_second_machine_takes_everything_from_s3_although_both_are_killed_in_between(url: str, tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)
    assert finished(first.events(kill_at=at("log", "quantize", "quantize: done"))) == dict.fromkeys(IDS[:3], False)  # before its upload
    shared = second.plan()
    assert [name for name in IDS if shared[name][-2:] == ["in", "store"]] == IDS[:3]
    assert shared["store"][1:4] == [f"{url}:", "3", "of"]
    made = finished(first.events())
    assert made == {name: name in IDS[:4] for name in IDS}
    assert finished(second.events(kill_at=at("stage_started", "quantize"))) == dict.fromkeys(IDS[:3], True)
    partly = second.plan()
    assert [name for name in IDS if partly[name][-1] == "cached"] == IDS[:3]
    assert [name for name in IDS if partly[name][-2:] == ["in", "store"]] == IDS[3:]
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
