import hashlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cli import app
from compress.commands.doctor import examine
from foundation.core.errors import InputError
from triton_repo import environment

ROOT = Path(environment.__file__).parents[1]


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==([0-9]+!)?[A-Za-z0-9.]+", line) for line in lines)
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "compress" / f"server-{environment.lock_digest()[:12]}"


def interpreter(path: Path, script: str) -> None:
    """A folder that looks like a finished environment, with a script in the place of Python."""
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python3").write_text(f"#!/bin/sh\n{script}\n")
    (path / "bin" / "python3").chmod(0o755)
    (path / environment.MARKER).write_text(environment.lock_digest() + "\n")


def server(path: Path) -> environment.ServerEnvironment:
    """An environment that works."""
    return environment.ServerEnvironment(path, "3.12", path / "site", path, {"numpy": "1.26.4"})


def installed(path: Path, version: str | None) -> None:
    """Leaves one version of llguidance in the environment; None: none."""
    (path / "site").mkdir(parents=True, exist_ok=True)
    for folder in (path / "site").glob("*.dist-info"):
        shutil.rmtree(folder)
    if version is not None:
        folder = path / "site" / f"llguidance-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llguidance\nVersion: {version}\n")


def test_requirements_are_exact_and_those_of_the_tool():
    server, tool = pins(environment.REQUIREMENTS), pins(ROOT / "constraints.txt")
    assert server["numpy"].startswith("1.")
    assert "nvidia-pytriton" in server
    assert not {"torch", "transformers"} & server.keys()
    for name in ("openvino", "tokenizers", "pillow"):
        assert server[name] == tool[name]


def test_location_in_the_cache(cache, monkeypatch):
    assert environment.location() == cache
    assert environment.lock_digest() == hashlib.sha256(environment.REQUIREMENTS.read_bytes()).hexdigest()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert environment.location() == Path("/home/somebody/.cache/compress") / cache.name


def test_location_from_the_variable(cache, monkeypatch):
    monkeypatch.setenv(environment.VARIABLE, "/opt/server")
    assert environment.location() == Path("/opt/server")


def test_a_missing_environment_says_what_to_do(cache):
    with pytest.raises(InputError, match=r"^server environment: .*: run `compress doctor --fix`$"):
        environment.check()


def test_an_unfinished_environment(cache):
    interpreter(cache, "exit 0")
    (cache / environment.MARKER).unlink()
    with pytest.raises(InputError, match="incomplete"):
        environment.check()


def test_a_broken_environment_quotes_the_reason(cache):
    interpreter(cache, "echo 'Traceback' >&2; echo \"ModuleNotFoundError: No module named 'openvino'\" >&2; exit 1")
    with pytest.raises(InputError, match=r"No module named 'openvino'; run `compress doctor --fix`"):
        environment.check()


@pytest.mark.parametrize(("numpy", "message"), [("2.0.1", "numpy 2.0.1 is installed"), ("1.26.4", "tritonserver is missing")])
def test_parts_are_looked_at(cache, numpy, message):
    versions = f'{{"nvidia-pytriton": "0.7.0", "numpy": "{numpy}", "openvino": "1", "tokenizers": "1", "pillow": "1"}}'
    interpreter(cache, f'echo \'FOUND{{"site": "{cache}", "python": "3.11", "libraries": "", "versions": {versions}}}\'')
    with pytest.raises(InputError, match=message):
        environment.check()


def test_a_given_environment_is_never_built(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match=r"correct or unset \$COMPRESS_SERVER_ENV"):
        environment.build()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_build_leaves_nothing_and_quotes_pip(cache, monkeypatch):
    run = environment._run

    def refusing(command, variables=None):
        if "venv" in command:
            interpreter(cache, "echo 'ERROR: No matching distribution for a==1' >&2; echo 'notice: a new pip' >&2; exit 1")
            return ""
        return run(command, variables)

    monkeypatch.setattr(environment, "_run", refusing)
    with pytest.raises(InputError, match="No matching distribution for a==1; it needs"):
        environment.build()
    assert not cache.exists()


def test_additions_are_installed_once_into_an_environment_that_is_there(cache, monkeypatch):
    calls: list[list[str]] = []
    found = server(cache)

    def install(command, variables=None):
        calls.append(command)
        installed(cache, environment._pinned()["llguidance"])
        return ""

    monkeypatch.setattr(environment, "check", lambda: found)
    monkeypatch.setattr(environment, "_run", install)
    interpreter(cache, "exit 0")
    assert (environment.build(), environment.build()) == (found, found)
    [call] = calls
    assert call[-2:] == ["--requirement", str(environment.ADDITIONS)]
    assert "--no-deps" in call
    for version in ("0.1", None):  # of an earlier release, and removed since
        installed(cache, version)
        environment.build()
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("given", "remedy"), [(False, "run `compress doctor --fix`"), (True, "pip install llguidance into $COMPRESS_SERVER_ENV")]
)
def test_the_doctor_names_a_missing_addition(given, remedy, cache, monkeypatch):
    monkeypatch.setattr(environment, "check", lambda: server(cache))
    if given:
        monkeypatch.setenv(environment.VARIABLE, str(cache))

    def lines():
        return [line for line in examine() if line.startswith("llguidance")]

    assert lines() == [f"llguidance     missing in the server environment: JSON_SCHEMA and REGEX are refused; {remedy}"]
    installed(cache, "1.9.1")
    assert lines() == ["llguidance     1.9.1"]


def test_a_cache_that_cannot_be_written(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"is not writable .*XDG_CACHE_HOME"):
        environment.build()


def test_fix_that_cannot_write_fails_with_one_line(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert "triton server  server environment: " in shown.stdout
    fixed = CliRunner().invoke(app, ["doctor", "--fix"])
    assert fixed.exit_code == 2
    [line] = fixed.stderr.splitlines()
    assert line.startswith("server environment: ")
    assert "is not writable" in line


OFFLINE = """\
WARNING: Retrying after connection broken by 'NewConnectionError(': Failed to establish a new connection: [Errno -3]')': /simple/
ERROR: Could not find a version that satisfies the requirement nvidia-pytriton==0.7.0 (from versions: none)
ERROR: No matching distribution found for nvidia-pytriton==0.7.0
"""


@pytest.mark.parametrize(
    ("step", "said", "cause", "remedy"),
    [
        (
            "install",
            "ERROR: Could not install packages: [Errno 28] No space left on device",
            "No space left",
            "free some space",
        ),
        ("venv", "Error: [Errno 13] Permission denied: '/cache/server'", "Permission denied", "make that folder writable"),
        ("install", OFFLINE, "no connection to the package index", "PIP_INDEX_URL"),
    ],
)
def test_a_failed_fix_says_what_to_do(step, said, cause, remedy, cache, monkeypatch):
    def failing(command, **options):
        return SimpleNamespace(returncode=int(step in command), stdout="", stderr=said)

    monkeypatch.setattr(environment.subprocess, "run", failing)
    fixed = CliRunner().invoke(app, ["doctor", "--fix"])
    assert fixed.exit_code == 2
    [line] = fixed.stderr.splitlines()
    assert cause in line
    assert remedy in line
    assert not cache.exists()
