"""`compress mcp`, driven by the client of the package mcp: with a command that stands for compress, and as a process with a real run."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.commands import mcp as command
from compress.commands.mcp import Tools, server_of
from compress.events.event_file import EVENTS
from foundation.core.errors import InputError
from foundation.machine.process import environment
from tests.tiny_recipes import tiny_vit

pytest.importorskip("mcp", reason="the extra `mcp`, which `dev` includes, is not installed")
from mcp import Client, StdioServerParameters

pytestmark = pytest.mark.whole

STAND_IN = """
import json, os, signal, sys, time

def write(**event):
    print(json.dumps({"time": "2026-01-01T00:00:00.000Z", **event}), flush=True)

(out,) = [word[6:] for word in sys.argv if word.startswith("--out=")]
if "--from=nowhere" in sys.argv:
    write(event="error", kind="input", problems=[{"key": "--from nowhere", "line": "--from nowhere: unknown"}])
    write(event="run_finished", exit_status=2)
    sys.exit(2)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
write(event="run_started", name="tiny", folder=out, process=os.getpid(), stages=["model"])
write(event="stage_started", stage="model", number=1, count=1)
try:
    while not os.path.exists(out + "/go"):
        time.sleep(0.02)
except SystemExit:
    write(event="error", kind="stopped", problems=[{"line": "stopped"}])
    write(event="run_finished", exit_status=143)
    raise
write(event="stage_finished", stage="model", seconds=1.0)
write(event="run_finished", exit_status=3, result={"speedup": 2.0})
sys.exit(3)
"""
"""Writes events as `compress run --json` does, and waits for the file `go`."""
RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [{"finetune": {"epochs": 0.2, "learning_rate": 1e-3}}, {"export": {}}],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(RAW))
    Path("wrong.yaml").write_text(yaml.safe_dump({**RAW, "data": {"path": "sklearn:digits", "max_lenght": 3}, "modle": {}}))
    Path("stand_in.py").write_text(STAND_IN)
    return tmp_path


def client(folder: Path) -> Any:
    """A client of a server of its own."""
    return Client(server_of(Tools([sys.executable, "-S", str(folder / "stand_in.py")])))


async def call(client: Any, tool: str, **arguments: object) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    return dict(answer.structured_content)


async def refused(client: Any, tool: str, **arguments: object) -> str:
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error, answer.structured_content
    (content,) = answer.content
    assert "\n" not in content.text
    assert "Traceback" not in content.text
    return str(content.text)


async def until(client: Any, folder: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    while not holds(state := await call(client, "status", folder=folder, wait_seconds=0.02)):
        assert state["state"] == "running", state
    return state


def works(state: dict[str, Any]) -> bool:
    return [stage["state"] for stage in state["stages"]] == ["running"]


@pytest.mark.slow
def test_a_run_goes_on_without_its_client_and_is_followed_by_the_next(folder: Path) -> None:
    async def work() -> None:
        async with client(folder) as first:
            started = await call(first, "run", recipe="recipe.yaml", out="run", wait_seconds=0)
            assert (started["state"], started["folder"]) == ("running", str(folder / "run"))
            assert str(folder / "run") in await refused(first, "run", recipe="recipe.yaml", out="run")
        async with client(folder) as second:
            state = await until(second, "run", works)
            assert state["name"] == "tiny"
            (folder / "run" / "go").touch()
            ended = await call(second, "status", folder="run", wait_seconds=60)
            assert (ended["state"], ended["exit_status"], ended["result"]["speedup"]) == ("finished", 3, 2.0)
            assert ended["stages"] == [{"stage": "model", "state": "done", "seconds": 1.0}]
            assert await call(second, "stop", folder="run") == ended  # nothing is there to be stopped
            again = await call(second, "run", recipe="recipe.yaml", out="run", wait_seconds=60)
            assert again["state"] == "finished"
            assert len((folder / "run" / EVENTS).read_text().splitlines()) == 4  # of the last run alone

    asyncio.run(work())


def test_a_run_is_stopped_or_killed(folder: Path) -> None:
    async def work() -> None:
        async with client(folder) as one:
            await call(one, "run", recipe="recipe.yaml", wait_seconds=0)
            stopped = await call(one, "stop", folder="runs/tiny")  # also while libraries are loaded
            assert (stopped["state"], stopped["exit_status"]) == ("stopped", 143)
            await call(one, "run", recipe="recipe.yaml", wait_seconds=0)
            os.kill((await until(one, "runs/tiny", works))["process"], signal.SIGKILL)
            killed = await call(one, "status", folder="runs/tiny", wait_seconds=60)
            assert (killed["state"], killed["exit_status"], len(killed["problems"])) == ("failed", None, 1)

    asyncio.run(work())


@pytest.mark.slow
def test_what_is_wrong_is_one_line(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("mine")

    async def work() -> None:
        async with client(folder) as one:
            listed = {tool.name: tool for tool in (await one.list_tools()).tools}
            assert set(listed) == {"plan", "run", "status", "stop", "report", "verify"}
            assert all(tool.description and tool.output_schema for tool in listed.values())
            assert listed["plan"].input_schema["required"] == ["recipe"]
            line = await refused(one, "run", recipe="wrong.yaml")
            assert "max_lenght" in line
            assert "modle" in line
            assert "--out" in await refused(one, "run", recipe="recipe.yaml", out="a\0b")
            assert "mine" in await refused(one, "run", recipe="recipe.yaml", out="mine")
            assert "--from nowhere" in await refused(one, "run", recipe="recipe.yaml", start="nowhere", wait_seconds=60)
            for tool in ("status", "stop", "report", "verify"):
                assert "nowhere" in await refused(one, tool, folder="nowhere"), tool
                assert not (folder / "nowhere").exists()

    asyncio.run(work())
    assert sorted(os.listdir(folder / "mine")) == ["thesis.txt"]


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(InputError) as caught:
        command.serve()
    assert "[mcp]" in caught.value.problems[0].remedy


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_run_by_a_server_of_its_own(folder: Path) -> None:
    server = StdioServerParameters(command=sys.executable, args=["-P", "-m", "cli", "mcp"], env=environment(), cwd=folder)

    async def begin() -> str:
        async with Client(server) as one:
            assert "max_lenght" in await refused(one, "plan", recipe="wrong.yaml")
            planned = await call(one, "plan", recipe="recipe.yaml")
            assert "finetune" in planned["plan"]
            assert planned["problems"] == []
            return str((await call(one, "run", recipe="recipe.yaml", out="run", wait_seconds=0))["folder"])

    async def conclude(run: str) -> None:
        async with Client(server) as one:
            ended = await call(one, "status", folder=run, wait_seconds=1500)
            assert ended["state"] == "finished", ended
            reported = await call(one, "report", folder="run")
            assert reported["result"] == ended["result"]
            assert reported["lines"]
            assert (await call(one, "verify", folder="run"))["intact"]
            report = json.loads((folder / "run" / "report.json").read_text())
            (folder / "run" / "report.json").write_text(json.dumps({**report, "name": "changed"}))
            changed = await call(one, "verify", folder="run")
            assert not changed["intact"]
            assert changed["problems"]

    asyncio.run(conclude(asyncio.run(begin())))
