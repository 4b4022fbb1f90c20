"""`compress plan`: checks a recipe and predicts sizes, FLOPs, disk space, memory and times without reading weights.

What each step will make and take is counted by `compress.commands.counted`, once (`compress.commands.remembered`): the next plan of the
same recipe loads neither torch nor data, unless it has a store, which is looked into each time. Four of five runs take a time within the
printed range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.commands import planned_cascade
from compress.commands.remembered import CountedStep, Facts, remembered
from compress.recipe import Recipe, dump, untracked
from compress.run import durations
from compress.run.durations import NO_TIME, Expected
from compress.run.pace import seconds_of_one
from compress.run.room import Room, shortage, shown
from compress.run.speed import Speed, speed
from compress.store_settings import store_of
from foundation.core.errors import Problem
from foundation.core.files import local
from foundation.core.progress import ConsoleProgress


@dataclass(frozen=True)
class Step:
    """A step of the plan."""

    id: str
    cached: bool
    """Whether it will not run."""
    stored: bool
    """Whether its artifact will be fetched from the store."""
    disk_bytes: int
    scratch_bytes: int
    """Disk space that it takes besides while it runs."""
    memory_bytes: int
    expected: Expected
    line: str


@dataclass(frozen=True)
class Plan:
    """A plan as text, and why it cannot be carried out here."""

    text: str
    steps: tuple[Step, ...]
    refused: tuple[Problem, ...]
    """What the machine lacks."""


def describe(recipe: Recipe, out: Path | None = None, devices: str | None = None, streams: int | None = None) -> str:
    """Returns the plan as text, with what the machine lacks for it; arguments and errors as of `plan`."""
    found = plan(recipe, out, devices, streams)
    return "\n".join((found.text, *map(str, found.refused)))


def plan(recipe: Recipe, out: Path | None = None, devices: str | None = None, streams: int | None = None) -> Plan:
    """Returns the plan, with the plan of the search if the recipe has a `search`.

    Args:
        recipe: The recipe.
        out: The run folder.
        devices: Devices to train and to serve on, such as `8x80GB` (`compress.devices.spec`); None: nothing is said of devices.
        streams: Answers at once, or rows of a batch, that the devices serve; None: the default of `compress.commands.devices`.

    Raises:
        InputError: The recipe, the data or the model does not allow the run.
    """
    folder, more = local(out or Path("runs") / recipe.name, "--out"), list[str]()
    check_places(recipe)
    with ConsoleProgress().alive("reading data and model"):
        if devices is None and recipe.search is None and store_of(recipe.store) is None:
            facts = remembered(dump(untracked(recipe)), folder, lambda: _facts(recipe, folder))
        else:
            facts, more = _with_more(recipe, folder, devices, streams, out)
        known = speed(facts["threads"])
        steps = [_predicted(step, known) for step in facts["steps"]]
    todo, room = [step for step in steps if not step.cached], Room.here(folder)
    written = sum(step.disk_bytes for step in steps if step.stored or not step.cached)
    scratch = max((step.scratch_bytes for step in todo), default=0)  # a step removes its own before the next one starts
    short = shortage(written + scratch, {step.id: step.memory_bytes for step in todo}, room)
    lines = [
        f"{recipe.name}: {recipe.model.task}, run folder {folder}",
        *facts["above"],
        f"{'step':<20} {'parameters':>12} {'GFLOPs/row':>11} {'disk':>10} {'memory':>10} {'time':>10}  range",
        *(step.line for step in steps),
        *facts["below"],
        *planned_cascade.lines(recipe, facts["steps"], known, folder),
        *_fetched(steps, store_of(recipe.store)),
        *_total(steps, todo, written, room),
        *(f"warning: {line}" for line in short.warned),
        *more,
    ]
    return Plan("\n".join(lines), tuple(steps), short.refused)


def check_places(recipe: Recipe) -> None:
    """Checks that the tracking server and the store of the recipe answer, if there are any; their libraries are imported only then.

    Raises:
        InputError: One does not, or its package is not installed.
    """
    if recipe.track is not None:
        from compress.track.tracking import check_server

        check_server(recipe.track)
    if (url := store_of(recipe.store)) is not None:
        from compress.run.sharing import answering

        answering(url, create=False)


def _facts(recipe: Recipe, folder: Path) -> Facts:
    from compress.commands.counted import counted

    return counted(recipe, folder).facts


def _with_more(recipe: Recipe, folder: Path, devices: str | None, streams: int | None, out: Path | None) -> tuple[Facts, list[str]]:
    """Returns the counts, and the lines about devices and about a search."""
    from compress.commands.counted import counted

    found, lines = counted(recipe, folder), list[str]()
    if devices is not None:
        from compress.commands.devices import describe as describe_devices

        lines += ["", *describe_devices(recipe, found.planned, found.context, devices, streams)]
    if recipe.search is not None:
        from compress.search.plan import describe as describe_search

        lines += ["", describe_search(recipe, out)]
    return found.facts, lines


def _predicted(step: CountedStep, known: Speed) -> Step:
    """Returns a step with what is predicted from the records and the speed of the machine."""
    name, cached, expected, memory = step["stage"], step["cached"], NO_TIME, 0
    time, between = "in store" if step["stored"] else "cached", ""
    if not cached:
        expected = durations.predict(name, step["parts"], seconds_of_one(name, known), reuses=step["reuses"])
        memory = durations.predicted_memory(name, step["memory_bytes"])
        time, between = _duration(expected.seconds), f"  {_range(expected)}"
    parameters = "" if step["parameters"] is None else f"{step['parameters']:,}"
    flops = "" if step["flops"] is None else f"{step['flops'] / 1e9:.3f}"
    taken = "" if cached else shown(memory)
    line = f"{step['id']:<20} {parameters:>12} {flops:>11} {_bytes(step['disk_bytes']):>10} {taken:>10} {time:>10}{between}{step['note']}"
    scratch = 0 if cached else step["scratch_bytes"]
    line += f"  {shown(scratch)} more on disk while it runs" if scratch else ""
    return Step(step["id"], cached, step["stored"], step["disk_bytes"], scratch, memory, expected, line)


def _fetched(steps: Sequence[Step], url: str | None) -> Iterator[str]:
    """Yields what the store of the recipe gives, if it has one."""
    if url is not None:
        there = [step for step in steps if step.stored]
        size = f", {_bytes(sum(step.disk_bytes for step in there))} to fetch" if there else ""
        yield f"store {url}: {len(there)} of {len(steps)} steps{size}"


def _total(steps: Sequence[Step], todo: Sequence[Step], written: int, room: Room) -> Iterator[str]:
    """Yields the totals of all steps, and the resources of the machine.

    Args:
        steps: All steps.
        todo: Those that will run.
        written: Bytes that will be written, or fetched.
        room: The machine.
    """
    time = Expected.total([step.expected for step in todo])
    disk = sum(step.disk_bytes for step in steps)
    peak = max((step.memory_bytes for step in todo), default=0)
    yield f"total: {_bytes(disk)} on disk, memory {shown(peak)}, time {_duration(time.seconds)} ({_range(time)})"
    free = f"{shown(room.disk_bytes)} free in {room.folder}"
    yield f"this machine: {_bytes(written)} still to write and {free}, {shown(room.memory_bytes)} of memory available"


def _range(expected: Expected) -> str:
    return f"{_duration(expected.low)} to {_duration(expected.high)}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
