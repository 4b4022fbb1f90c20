"""`make install` and `make demo`: one line for each step, and nothing swallowed. Python, pip and the command are stand-ins."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PYTHON = """#!/bin/sh
case "$*" in
  --version) echo "Python 3.11.7" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$STANDINS/pip" "$STANDINS/compress" "$STANDINS/python" "$3/bin/" ;;
  "-m benchmarks.gpu.check"*) echo "checked $*" ;;
  "-c import sys, tensorrt"*) [ -z "$UNSEEN" ] || { echo "torch sees no GPU" >&2; exit 1; }; echo "cuda           the check" ;;
esac
"""
PIP = """#!/bin/sh
case " $* " in *" -qq "*) ;; *) echo "WARNING: Location '/opt/index' is ignored" ;; esac
[ -z "$FAIL" ] || { echo "ERROR: No matching distribution found for torch" >&2; exit 1; }
"""
COMPRESS = """#!/bin/sh
case "$1" in
  doctor) echo "processor      one, 2 cores"; echo "triton server  /cache/server" ;;
  run) echo "accuracy    1 -> 1"; exit ${STATUS:-0} ;;
esac
"""


def make(folder: Path, goal: str, pip: str = PIP, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs make in a copy of what it needs, with stand-ins for all that it starts."""
    assert shutil.which("make"), "make is what a user starts"
    folder.mkdir(exist_ok=True)
    for name, text in {"python": PYTHON, "pip": pip, "compress": COMPRESS}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {**os.environ, "STANDINS": str(folder), **variables}
    variables = {name: value for name, value in variables.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--no-print-directory", "-C", str(ROOT), goal, f"VENV={folder / 'venv'}", f"PYTHON={folder / 'python'}"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_install_is_one_line_for_each_step(tmp_path: Path) -> None:
    done = make(tmp_path, "install")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"environment    {tmp_path / 'venv'}, Python 3.11.7",
        "packages       from the index, in the versions of constraints.txt; takes minutes the first time",
        "triton server  /cache/server",
    ]
    assert (tmp_path / "venv" / ".installed").exists()


@pytest.mark.parametrize(("status", "expected"), [("0", 0), ("3", 0), ("2", 2)])
def test_demo_prints_what_the_run_prints(status: str, expected: int, tmp_path: Path) -> None:
    make(tmp_path, "install")
    done = make(tmp_path, "demo", STATUS=status)
    assert done.returncode == expected
    assert done.stdout == "accuracy    1 -> 1\n"


def test_what_pip_complains_of_is_shown_and_ends_it(tmp_path: Path) -> None:
    done = make(tmp_path, "install", FAIL="1")
    assert done.returncode == 2
    assert "ERROR: No matching distribution found for torch" in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()


def test_cuda_installs_tensorrt_and_says_what_it_sees(tmp_path: Path) -> None:
    pip = PIP.replace("#!/bin/sh\n", '#!/bin/sh\necho "$*" >> "$STANDINS/asked"\n')
    for cuda, expected in (("", "[dev,tensorrt-rtx]"), ("1", "[dev,tensorrt-rtx,tensorrt]")):
        done = make(tmp_path, "install", pip=pip, CUDA=cuda)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "asked").read_text().splitlines()[-1].endswith(f"--editable .{expected}")
        assert ("cuda           the check" in done.stdout) == bool(cuda)
    assert {path.name for path in (tmp_path / "venv").glob(".installed*")} == {".installed", ".installed-cuda"}


def test_cuda_without_a_gpu_installs_nothing_that_counts(tmp_path: Path) -> None:
    done = make(tmp_path, "install", CUDA="1", UNSEEN="1")
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
    assert not (tmp_path / "venv" / ".installed-cuda").exists()


@pytest.mark.parametrize("missing", ["nvidia-smi", "docker", None])
def test_gpu_check_says_what_is_missing_before_it_installs(missing: str | None, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"nvidia-smi", "docker"} - {missing}:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    for name in ("sh", "make", "mkdir", "cp", "touch", "grep", "echo"):
        (programs / name).symlink_to(str(shutil.which(name)))
    done = make(tmp_path, "gpu-check", RELEASE="26.01", PATH=str(programs))
    if missing is None:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-2:] == ["cuda           the check", "checked -m benchmarks.gpu.check --release 26.01"]
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[0].startswith(f"gpu-check: {missing} is not there; it needs an NVIDIA GPU and Docker")
        assert not (tmp_path / "venv").exists()
