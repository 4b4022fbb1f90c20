"""`compress plan`: checks a recipe and predicts sizes, FLOPs, disk space and times without reading weights.

Parameters and FLOPs are counted on the meta device by the function that also counts finished checkpoints. Times are predicted from earlier
runs on this machine (`compress.run.durations`) and "unknown" without any. A step is cached only if all steps before it are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compress.artifacts import artifact
from compress.artifacts.artifact import Artifact, DamagedArtifact
from compress.commands.disk import Variant, predicted_bytes
from compress.core.files import local
from compress.core.progress import ConsoleProgress
from compress.core.tasks import TASKS, num_classes
from compress.models.importing import check_model
from compress.models.size import Counts, count
from compress.models.tokenizer import resolve_tokenizer
from compress.pipeline import plan_steps
from compress.recipe import Recipe
from compress.run import durations
from compress.run.cache import cache_key
from compress.run.implicit import Evaluate, is_variant
from compress.run.prepare import prepare
from compress.run.state import RunState
from compress.stage.context import Context
from compress.stage.stage import Stage, input_named, lines


@dataclass(frozen=True)
class PlannedStep:
    """The prediction for one step."""

    step: Stage
    cached: Artifact | None
    """Its artifact, if this step and all steps before it are cached."""
    size: Counts | None
    """Parameters and MACs of its checkpoint; None for a step that makes no checkpoint."""
    disk_bytes: int
    seconds: float | None
    """Predicted time; None if no comparable run was recorded on this machine."""


def describe(recipe: Recipe, out: Path | None = None) -> str:
    """Returns the plan as text.

    Raises:
        InputError: The recipe, the data or the model does not allow the run.
    """
    folder = local(out or Path("runs") / recipe.name, "--out")
    context = prepare(recipe, folder, ConsoleProgress("quiet"))
    context.count_macs()
    planned = list(steps_of(recipe, folder, context))
    data = context.data
    unit = f"blocks of {context.max_length} tokens" if TASKS[context.task].answer == "tokens" else "rows"
    lines = [
        f"{recipe.name}: {recipe.model.task}, run folder {folder}",
        f"data: {len(data.train)} train, {len(data.selection)} selection, {len(data.evaluation)} evaluation {unit}",
        f"{'step':<20} {'parameters':>12} {'GFLOPs/row':>11} {'disk':>10} {'time':>10}",
    ]
    lines += [_line(entry) for entry in planned]
    todo = [entry for entry in planned if entry.cached is None]
    seconds = [entry.seconds for entry in todo]
    known = [value for value in seconds if value is not None]
    missing = ", ".join(str(entry.step.id) for entry in todo if entry.seconds is None)
    unknown = f", not counting {missing}: no comparable run was recorded on this machine" if missing else ""
    total = _duration(sum(known)) + unknown
    lines.append(f"total: {_bytes(sum(entry.disk_bytes for entry in planned))} on disk, time {total}")
    return "\n".join(lines)


def steps_of(recipe: Recipe, folder: Path, context: Context) -> Iterator[PlannedStep]:
    """Yields the prediction for every step, in order."""
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    checked = check_model(recipe.model, num_classes(context.task, context.data.labels), recipe.data.max_length, tokenizer)
    config, size = checked.config, count(checked.config, context.task, context.max_length)
    steps, macs, state = plan_steps(recipe), size.macs, RunState()
    behind = lines(steps)
    variants: dict[str, Variant] = {}
    sizes: dict[str, Counts] = {}
    chain = True
    for step in steps:
        if (named := input_named(step)) is not None:
            name = next(iter(variants)) if named == "baseline" else named
            config, size, macs = variants[name].config, sizes[name], sizes[name].macs
        state = state.before(step) if chain else state
        found = _find(step, state, context, folder) if chain else None
        chain = found is not None
        work, after = step.work(macs, context.data), step.config_after(config)
        if after is not config:
            config, size = after, count(after, context.task, context.max_length)
        if is_variant(step, steps):
            made_by = tuple(stage for stage in behind[str(step.id)] if is_variant(stage, steps))
            variants[str(step.id)], sizes[str(step.id)] = Variant(config, made_by), size
        macs = size.macs if isinstance(step, Evaluate) else macs  # as in a run: from the last evaluation
        disk = found.size_bytes if found else predicted_bytes(step, config, variants, context)
        seconds = 0.0 if found else durations.predict(step.NAME, work)
        yield PlannedStep(step, found, size if step.PRODUCES == "checkpoint" else None, disk, seconds)
        state = state.after(step, found, variant=is_variant(step, steps)) if found else state


def _find(step: Stage, state: RunState, context: Context, folder: Path) -> Artifact | None:
    key = cache_key(step, state.parent, state.context_for(step, context))
    try:
        found = artifact.load(folder / "stages" / f"{step.id}-{key[:8]}")
    except DamagedArtifact:
        return None
    return found if found.key == key else None


def _line(entry: PlannedStep) -> str:
    parameters = f"{entry.size.parameters:,}" if entry.size else ""
    flops = f"{entry.size.flops / 1e9:.3f}" if entry.size else ""
    time = "cached" if entry.cached else "unknown" if entry.seconds is None else _duration(entry.seconds)
    return f"{entry.step.id!s:<20} {parameters:>12} {flops:>11} {_bytes(entry.disk_bytes):>10} {time:>10}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
