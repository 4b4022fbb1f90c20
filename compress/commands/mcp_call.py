"""A command of compress that ends soon, in a process of its own for `compress mcp`: what it loads goes with it, and it can be stopped.

python -m compress.commands.mcp_call < {"tool": "plan", "arguments": {...}} > {"planned": {...}} or {"refused": [...]}
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

from compress.commands.exit_status import Failure, finish
from compress.events.stdout import take_stdout
from foundation.artifacts.document import Document
from foundation.core.errors import InputError, Problem
from foundation.machine.process import spawn

CALL = (sys.executable, "-P", "-m", "compress.commands.mcp_call")


class Planned(Document):
    """A plan."""

    plan: str = ""
    """Parameters, FLOPs, disk, memory and time of every stage, as a table."""
    problems: tuple[str, ...] = ()
    """Why it cannot be carried out on this machine, a line each; empty if it can."""


class Verified(Document):
    """The result of a check."""

    intact: bool = False
    """Whether nothing differs."""
    problems: tuple[str, ...] = ()
    """A line for each difference."""
    checks: tuple[str, ...] = ()
    """What was checked."""


class Answer(Document):
    """What a call returns: one of these."""

    planned: Planned | None = None
    """Of `plan`."""
    verified: Verified | None = None
    """Of `verify`."""
    refused: tuple[str, ...] = ()
    """Why there is no answer: a line for each problem."""


async def call(tool: str, arguments: Mapping[str, object]) -> Answer:
    """Runs a command to its end; it is stopped if the task is cancelled.

    Raises:
        InputError: It was refused, or it failed.
    """
    process = spawn(CALL, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    request = json.dumps({"tool": tool, "arguments": arguments}).encode()
    try:
        written, _ = await asyncio.to_thread(process.communicate, request)
    except asyncio.CancelledError:
        process.terminate()
        raise
    if not written:
        raise InputError(f"compress {tool}", f"its process ended with status {process.returncode} and no answer")
    answer = Answer.model_validate_json(written)
    if answer.refused:
        raise InputError.of(Problem("", line) for line in answer.refused)
    return answer


def plan(recipe: str, settings: list[str], out: str | None) -> Answer:
    """Returns the plan of a recipe.

    Raises:
        InputError: The recipe, the data or the model does not allow the run.
    """
    from compress.commands.plan import plan as look_ahead
    from compress.commands.recipes import load

    found = look_ahead(load(recipe, settings), None if out is None else Path(out))
    return Answer(planned=Planned(plan=found.text, problems=tuple(map(str, found.refused))))


def verify(folder: str, live: bool) -> Answer:
    """Returns what differs in a run folder.

    Raises:
        InputError: The folder holds no finished run, or the server cannot be started.
    """
    from compress.commands.verify import verify as verify_run

    checks: list[str] = []
    problems = tuple(map(str, verify_run(Path(folder), live=live, log=checks.append)))
    return Answer(verified=Verified(intact=not problems, problems=problems, checks=tuple(checks)))


class _Refusal:
    """Notes why a command fails; implements `compress.commands.exit_status.Listener`."""

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()

    def failed(self, failure: Failure) -> None:
        """Notes the problems."""
        self.lines = tuple(map(str, failure.problems))

    def ended(self, status: int) -> None:
        """Does nothing: the answer says how it ended."""


def main() -> None:
    """Answers the request on standard input; what libraries print goes to standard error."""
    stdout, refusal, answers = take_stdout(), _Refusal(), list[Answer]()

    def work() -> None:
        request = json.loads(sys.stdin.buffer.read())
        commands: dict[str, Callable[..., Answer]] = {"plan": plan, "verify": verify}
        answers.append(commands[request["tool"]](**request["arguments"]))

    try:
        finish(work, listener=refusal)
    except typer.Exit as end:
        answer = answers[0] if answers else Answer(refused=refusal.lines)
        content = answer.model_dump_json().encode()
        while content:
            content = content[stdout.write(content) or 0 :]
        sys.exit(end.exit_code)


if __name__ == "__main__":
    main()
