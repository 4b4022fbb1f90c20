"""Runs that are stopped or find no room: each says so in one line, leaves nothing half-written, and goes on where it was."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import yaml

from tests.test_kill import alive, finished_stages
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parent.parent
RECIPE = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [{"finetune": {"epochs": 0.5, "learning_rate": 1e-3}}, {"quantize": {"calibration": {"rows": 64}}}, {"export": {}}],
}
COMPRESS = [sys.executable, "-m", "cli"]
WITHOUT_FORECAST = "from compress import forecast; forecast.shortage = lambda *given: forecast.Shortage((), ()); import cli; cli.app()"
"""The command without the check of free space, as if the disk filled up after it."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def start(recipe: Path, folder: Path, mark: str = "") -> "subprocess.Popen[str]":
    command = [*COMPRESS, "run", str(recipe), "--out", str(folder), "--quiet"]
    variables = {**os.environ, "COMPRESS_TEST_MARK": mark}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def at_work(process: "subprocess.Popen[str]", folder: Path) -> bool:
    """Whether a run has locked the folder; before, it has nothing to clean up."""
    lock = folder / ".lock"
    return lock.exists() and lock.read_text() == str(process.pid)


def half_written(folder: Path) -> list[Path]:
    return [path for pattern in ("stages/.*.tmp", "stages/.*.old", ".*.tmp") for path in folder.glob(pattern)]


def shell(script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a script that may mount file systems, which nobody else sees."""
    return subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


def one_line(text: str, wanted: str) -> None:
    """A line of ours, and no traceback; libraries may warn."""
    lines = [line for line in text.splitlines() if re.search(wanted, line)]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    assert "internal error" not in text


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_half_written(number: signal.Signals, status: int, recipe: Path, tmp_path: Path) -> None:
    folder, mark, generator = tmp_path / "run", uuid.uuid4().hex, random.Random(number)
    kept: dict[str, int] = {}
    for _ in range(6):
        process = start(recipe, folder, mark)
        deadline = time.monotonic() + 120
        while not at_work(process, folder) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(generator.uniform(0.0, 5.0))
        process.send_signal(number)
        _, err = process.communicate()
        # an interrupt within exec() makes Python end itself with SIGINT after all, which a shell reports as 130 too
        ended = 128 + number if process.returncode == -signal.SIGINT else process.returncode
        assert ended in (status, 0, 3), err
        assert ended == status or (folder / "report.json").exists()
        if ended == status:
            one_line(err, "^stopped")
        assert half_written(folder) == []
        now = finished_stages(folder)
        assert kept.items() <= now.items(), "a finished stage was made again"
        kept = now
        while alive(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive(mark) == []
    process = start(recipe, folder)
    _, err = process.communicate()
    assert process.returncode in (0, 3, 4), err
    assert kept.items() <= finished_stages(folder).items()


@pytest.mark.parametrize(
    ("size", "command", "line"),
    [
        ("8k", [sys.executable, "-c", WITHOUT_FORECAST], "No space left on device; free some space"),
        ("100k", [sys.executable, "-c", WITHOUT_FORECAST], "No space left on device; free some space"),
        ("100k", COMPRESS, "MB are free there: free .* MB, or give --out a folder on another disk"),
    ],
)
def test_a_full_disk_is_one_line_and_the_run_goes_on_with_more_room(
    size: str, command: list[str], line: str, recipe: Path, tmp_path: Path
) -> None:
    place, run = tmp_path / "disk", f"run {recipe} --out {tmp_path}/disk/run --quiet"
    place.mkdir()
    found = shell(
        f"mount -t tmpfs -o size={size} none {place} && {shlex.join(command)} {run}; echo status $?; "
        f"find {place} -name '*.tmp' -o -name '*.old'; mount -o remount,size=64m {place} && {shlex.join(COMPRESS)} {run}; echo status $?; "
        f"{shlex.join(COMPRESS)} verify {place}/run; echo status $?"
    )
    statuses = re.findall(r"^status (\d+)$", found.stdout, re.M)
    assert statuses[0] == "2", (found.stdout, found.stderr)
    assert statuses[1] in ("0", "3", "4"), found.stderr
    assert statuses[2] == "0", found.stderr
    one_line(found.stderr, line)
    assert ".tmp" not in found.stdout
    assert ".old" not in found.stdout


@pytest.mark.parametrize("kilobytes", [1, 8, 40])
def test_a_limit_of_file_sizes_is_one_line_and_the_run_goes_on_without_it(kilobytes: int, recipe: Path, tmp_path: Path) -> None:
    script = f"ulimit -f {kilobytes}; exec {' '.join(COMPRESS)} run {recipe} --out {tmp_path}/run --quiet"
    found = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    one_line(found.stderr, r"File too large; raise the limit of the file size \(ulimit -f\)")
    assert half_written(tmp_path / "run") == []
    process = start(recipe, tmp_path / "run")
    _, err = process.communicate()
    assert process.returncode in (0, 3, 4), err


def test_a_read_only_folder_is_one_line(recipe: Path, tmp_path: Path) -> None:
    process = start(recipe, tmp_path / "run")
    assert process.wait() in (0, 3, 4)
    for verb in (f"run {recipe} --quiet --out", "report", "clean", "bench"):
        script = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} && cd {ROOT} && "
        found = shell(f"{script}{' '.join(COMPRESS)} {verb} {tmp_path}/run")
        assert found.returncode == 2, (verb, found.stderr)
        one_line(found.stderr, "Read-only file system; make it writable")
    found = shell(
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} && {' '.join(COMPRESS)} verify {tmp_path}/run"
    )
    assert found.returncode == 0, found.stderr  # reading is enough to verify


def test_of_two_runs_on_one_folder_the_second_gets_one_line(recipe: Path, tmp_path: Path) -> None:
    first = start(recipe, tmp_path / "run")
    while not at_work(first, tmp_path / "run"):
        time.sleep(0.05)
    second = start(recipe, tmp_path / "run")
    _, err = second.communicate()
    assert (second.returncode, len(err.splitlines())) == (2, 1)
    assert f"process {first.pid} is writing to it" in err
    _, err = first.communicate()
    assert first.returncode in (0, 3, 4), err
