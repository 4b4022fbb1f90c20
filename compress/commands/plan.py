"""`compress plan`: checks a recipe and predicts sizes, FLOPs, disk space, memory and times without reading weights.

What each step will make and take is predicted by `compress.forecast`. Four of five runs take a time within the range that stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.core.files import local
from compress.core.progress import ConsoleProgress
from compress.core.tasks import TASKS
from compress.forecast import PlannedStep, lacks, steps_of
from compress.measure.buckets import measured_at
from compress.models.own_shape import tokens_of
from compress.models.size import count
from compress.recipe import Recipe
from compress.report import phrases
from compress.run.durations import Expected
from compress.run.prepare import noted, prepare
from compress.run.room import Room, shown
from compress.stage.context import Context

SHORTEST = 128
"""Tokens below which the products of attention cost next to nothing."""


@dataclass(frozen=True)
class Plan:
    """A plan as text, and why it cannot be carried out here."""

    text: str
    refused: tuple[str, ...]
    """What the machine lacks, one line each."""


def describe(recipe: Recipe, out: Path | None = None, given: str | None = None, streams: int | None = None) -> str:
    """Returns the plan as text, with what the machine lacks for it; arguments and errors as of `plan`."""
    found = plan(recipe, out, given, streams)
    return "\n".join((found.text, *found.refused))


def plan(recipe: Recipe, out: Path | None = None, given: str | None = None, streams: int | None = None) -> Plan:
    """Returns the plan; of a recipe with a `search` that of the search too.

    Args:
        recipe: The recipe.
        out: The run folder.
        given: Devices to train and to serve on, such as `8x80GB` (`compress.devices.given`); None: nothing is said of devices.
        streams: Answers at once, or rows of a batch, that the devices serve; None: the default of `compress.commands.devices`.

    Raises:
        InputError: The recipe, the data or the model does not allow the run.
    """
    folder = local(out or Path("runs") / recipe.name, "--out")
    context = prepare(recipe, folder, ConsoleProgress("quiet"))
    context.count_macs()
    planned = list(steps_of(recipe, folder, context))
    notes = [*recipe.goals.questions(), *noted(recipe, planned[0].config, context)]
    data = context.data
    unit = f"blocks of {context.max_length} tokens" if TASKS[context.task].generates else "rows"
    lines = [
        f"{recipe.name}: {recipe.model.task}, run folder {folder}",
        f"data: {len(data.train)} train, {len(data.selection)} selection, {len(data.evaluation)} evaluation {unit}",
        *notes,
        f"{'step':<20} {'parameters':>12} {'GFLOPs/row':>11} {'disk':>10} {'memory':>10} {'time':>10}  range",
    ]
    lines += [" ".join((_line(entry), *_tokens(entry, planned))) for entry in planned]
    lines += _by_length(planned, context)
    lines += _total(planned, room := Room.here(folder))
    short = lacks(planned, room)
    lines += [f"warning: {line}" for line in short.warned]
    if given is not None:
        from compress.commands.devices import describe as describe_devices

        lines += ["", *describe_devices(recipe, planned, context, given, streams)]
    if recipe.search is not None:
        from compress.search.plan import describe as describe_search

        lines += ["", describe_search(recipe, out)]
    return Plan("\n".join(lines), short.refused)


def _line(entry: PlannedStep) -> str:
    parameters = f"{entry.size.parameters:,}" if entry.size else ""
    flops = f"{entry.size.flops / 1e9:.3f}" if entry.size else ""
    time, between = ("cached", "") if entry.cached else (_duration(entry.expected.seconds), f"  {_range(entry.expected)}")
    memory = "" if entry.cached else shown(entry.memory_bytes)
    return f"{entry.step.id!s:<20} {parameters:>12} {flops:>11} {_bytes(entry.disk_bytes):>10} {memory:>10} {time:>10}{between}"


def _total(planned: Sequence[PlannedStep], room: Room) -> Iterator[str]:
    """Yields what all steps take together, and what the machine has."""
    todo = [entry for entry in planned if entry.cached is None]
    time = Expected.total([entry.expected for entry in todo])
    disk, new = (sum(entry.disk_bytes for entry in entries) for entries in (planned, todo))
    peak = max((entry.memory_bytes for entry in todo), default=0)
    yield f"total: {_bytes(disk)} on disk, memory {shown(peak)}, time {_duration(time.seconds)} ({_range(time)})"
    free = f"{shown(room.disk_bytes)} free in {room.folder}"
    yield f"this machine: {_bytes(new)} still to write and {free}, {shown(room.memory_bytes)} of memory available"


def _range(expected: Expected) -> str:
    return f"{_duration(expected.low)} to {_duration(expected.high)}"


def _tokens(entry: PlannedStep, planned: Sequence[PlannedStep]) -> Iterator[str]:
    """Yields which shares of the tokens stay behind the blocks of a variant, where that is not as in the variant before it."""
    if entry.made_by and (shares := tokens_of(entry.config)):
        before = [other.config for other in planned for stage in entry.made_by[-2:-1] if other.step is stage]
        if not before or tokens_of(before[0]) != shares:
            yield f" {phrases.tokens_left(shares)}"


def _by_length(planned: list[PlannedStep], context: Context) -> list[str]:
    """Returns what a row of each length costs in the last variant, and the share of attention; nothing for rows that are no texts."""
    variants = [entry for entry in planned if entry.made_by]
    if TASKS[context.task].modality != "text" or TASKS[context.task].generates or not variants:
        return []
    target, longest = context.target, context.max_length
    lengths = target.lengths if target.buckets != "auto" else [length for length in measured_at(longest) if length >= SHORTEST]
    told = []
    for length in sorted({length for length in lengths if length < longest} | {longest}):
        size = count(variants[-1].config, context.task, length)
        told.append(f"{length} tokens {size.flops / 1e9:.3f} ({size.attention_macs / max(1, size.macs):.0%})")
    return [f"GFLOPs of a row in {variants[-1].step.id}, with the share of attention's products: {', '.join(told)}"]


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 9.95
        else f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
