"""SIGKILL at 20 random moments of the quickstart: nothing is repeated, nothing half-written is read, nothing of ours lives on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parent.parent
KILLS = 20
SETTINGS = ["--set", "stages.finetune.epochs=3", "--set", "target.batch_sizes=[1]"]


def start(folder: Path, mark: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "cli", "run", str(ROOT / "recipes" / "quickstart.yaml"), "--out", str(folder), "--quiet", *SETTINGS]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "COMPRESS_TEST_MARK": mark}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def alive(mark: str) -> list[str]:
    """Every process that carries our mark in its environment: the run, its engines, the server and its models."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"COMPRESS_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes() and (entry / "cmdline").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
        except OSError:
            continue
    return found


def finished_stages(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("stages/[a-z]*/manifest.json")}


def essence(folder: Path) -> list[Any]:
    report = json.loads((folder / "report.json").read_text())
    return [[variant["id"], variant["metrics"], variant["accuracy"], variant["int8_share"]] for variant in report["variants"]]


def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path / "whole", mark)
    started = time.monotonic()
    assert process.wait() in (0, 3, 4), process.stderr.read().decode() if process.stderr else ""
    seconds = time.monotonic() - started
    generator = random.Random(0)
    kept: dict[str, int] = {}
    for kill in range(KILLS):
        process = start(tmp_path / "killed", mark)
        try:
            process.wait(timeout=generator.uniform(2.0, max(6.0, seconds / 4)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        now = finished_stages(tmp_path / "killed")
        assert kept.items() <= now.items(), f"kill {kill}: a finished stage was made again"
        kept = now
        deadline = time.monotonic() + 5
        while alive(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive(mark) == [], f"kill {kill}"
    process = start(tmp_path / "killed", mark)
    assert process.wait() in (0, 3, 4)
    assert kept.items() <= finished_stages(tmp_path / "killed").items()
    assert essence(tmp_path / "killed") == essence(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob("stages/.*"))
