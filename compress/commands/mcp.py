"""`compress mcp`: a server of the Model Context Protocol (https://modelcontextprotocol.io) on standard input and output.

Its tools are commands of compress. A run is a process of its own: the server answers while it works, it goes on when the client leaves,
and the next server follows it by the event file of its folder. What is wrong reaches the client as one line, as on the terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from compress.commands.exit_status import failure_of
from compress.commands.mcp_call import Planned, Verified, call
from compress.commands.mcp_run import COMPRESS, start_run, stop, wait
from compress.events.model import Result
from compress.events.state import RunState
from foundation.artifacts.document import Document, read
from foundation.core.errors import InputError, Problem
from foundation.core.files import local
from foundation.core.version import version

if TYPE_CHECKING:
    from mcp.server import MCPServer

INSTRUCTIONS = (
    "compress makes a fine-tuned Transformer smaller and faster, and proves that it still works. "
    "`plan` checks a recipe and predicts time; `run` starts it and returns; `status` says how far it is; `stop` ends it; "
    "`report` has the figures of a finished run; `verify` checks that nothing was changed since. "
    "A run goes on when this server ends. Paths are relative to the folder in which the server was started."
)

P = ParamSpec("P")
R = TypeVar("R")


class Reported(Document):
    """The report of a run."""

    lines: tuple[str, ...] = ()
    """The outcome in a few lines."""
    result: Result = Result()
    """The outcome in figures; the file `result.report` has all of them."""


class Tools:
    """The tools of the server: each public coroutine is one, and its docstring is what a model reads.

    Args:
        command: The command of compress that runs recipes.
    """

    def __init__(self, command: Sequence[str] = COMPRESS) -> None:
        self._command = command

    async def plan(self, recipe: str, settings: list[str] | None = None, out: str | None = None) -> Planned:
        """Check a recipe and predict parameters, FLOPs, disk, memory and time of every stage, without loading weights.

        Args:
            recipe: A YAML file, or the name of a shipped recipe, such as quickstart.
            settings: Overrides, KEY.PATH=VALUE, such as stages.quantize.mode=qat.
            out: The run folder, whose finished stages count as done; default: runs/NAME.
        """
        answer = await call("plan", {"recipe": recipe, "settings": settings or [], "out": out})
        return answer.planned or Planned()

    async def run(
        self,
        recipe: str,
        settings: list[str] | None = None,
        out: str | None = None,
        start: str | None = None,
        force: bool = False,
        wait_seconds: float = 5.0,
    ) -> RunState:
        """Start a run and return while it works; a run that was stopped before is resumed. Ask `status` with `folder` for the rest.

        Args:
            recipe: A YAML file, or the name of a shipped recipe, such as quickstart.
            settings: Overrides, KEY.PATH=VALUE, such as stages.quantize.mode=qat.
            out: The run folder; default: runs/NAME.
            start: Id of a stage: it and every later one run again.
            force: Run every stage again.
            wait_seconds: Return after so long, or when the run ends.
        """
        options = [*([] if start is None else [f"--from={start}"]), *(["--force"] if force else [])]
        folder = await asyncio.to_thread(start_run, recipe, settings or [], out, options, self._command)
        state = await wait(folder, wait_seconds)
        if state.state == "failed" and not state.stages:  # refused before its first stage
            raise InputError.of(Problem("", problem.line) for problem in state.problems)
        return state

    async def status(self, folder: str, wait_seconds: float = 0.0) -> RunState:
        """Say how far a run is that `run` has started, now or in an earlier session: stages, progress, figures, problems, result.

        Args:
            folder: The run folder: `folder` of what `run` returned.
            wait_seconds: Wait for the end of the run for so long.
        """
        return await wait(local(folder, "run folder"), wait_seconds)

    async def stop(self, folder: str) -> RunState:
        """Stop a run that `run` has started; finished stages stay, and `run` with the same arguments continues.

        Args:
            folder: The run folder: `folder` of what `run` returned.
        """
        return await stop(local(folder, "run folder").absolute())

    async def report(self, folder: str) -> Reported:
        """Return the outcome of a finished run: accuracy before and after, speed, size, goals, and what is served.

        Args:
            folder: A run folder, such as runs/quickstart.
        """
        return await asyncio.to_thread(_reported, local(folder, "run folder"))

    async def verify(self, folder: str, live: bool = False) -> Verified:
        """Check the hashes of a finished run, and reload its engines and compare their answers with the recorded ones.

        Args:
            folder: A run folder, or a folder that `compress deploy` wrote.
            live: Also start Triton and check the served models.
        """
        answer = await call("verify", {"folder": folder, "live": live})
        return answer.verified or Verified()


def server_of(tools: Tools) -> MCPServer:
    """Returns the server of some tools.

    Raises:
        InputError: The package mcp is not installed.
    """
    try:
        from mcp.server import MCPServer
    except ImportError as error:
        raise InputError("mcp", "the package is not installed", remedy="pip install 'compress-transformers[mcp]'") from error
    server = MCPServer("compress", instructions=INSTRUCTIONS, version=version(), log_level="ERROR")
    every: list[Callable[..., Awaitable[Document]]] = [tools.plan, tools.run, tools.status, tools.stop, tools.report, tools.verify]
    for tool in every:
        server.add_tool(_refusing(tool), structured_output=True)
    return server


def serve() -> None:
    """Answers requests on standard input until it ends.

    Raises:
        InputError: The package mcp is not installed.
    """
    server_of(Tools()).run("stdio")


def _refusing(tool: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Returns a tool whose exceptions are one line, which the client gets."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    async def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await tool(*args, **kwargs)
        except Exception as error:  # last frame of the tool
            lines = map(str, failure_of(error).problems)
            raise ToolError("; ".join(" ".join(line.split()) for line in lines)) from error

    return called


def _reported(folder: Path) -> Reported:
    from compress.commands.run_json import result_of
    from compress.report.model.contents import Contents
    from compress.report.report import FILE
    from compress.report.summary import summary
    from compress.run.opened import opened

    opened(folder)  # a folder that is none of a run has a clearer error than a missing file
    contents = read(Contents, folder / FILE)
    return Reported(lines=tuple(summary(contents, folder)), result=result_of(folder, contents))
