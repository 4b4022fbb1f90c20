"""What a run will make and take, predicted without reading weights: for `compress plan`, and for the price of candidates of a search.

Parameters and FLOPs are counted on the meta device by the function that also counts finished checkpoints. Times are predicted from earlier
runs on this machine (`compress.run.durations`); None without any. A step is cached only if all steps before it are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.artifacts import artifact
from compress.artifacts.artifact import Artifact, DamagedArtifact
from compress.core.tasks import num_classes
from compress.models.importing import check_model
from compress.models.inputs.tokenizer import resolve_tokenizer
from compress.models.size import Counts, count
from compress.pipeline import plan_steps
from compress.recipe import Recipe
from compress.run import durations
from compress.run.cache import cache_key
from compress.run.disk import Variant, predicted_bytes
from compress.run.implicit import Evaluate, is_variant
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
    config: Any
    """Transformers config of the model after this step."""
    made_by: tuple[Stage, ...]
    """The stages that lead to its checkpoint, from the baseline on, itself last; empty for a step that makes no checkpoint."""
    disk_bytes: int
    work: float
    """Multiply-accumulates (`Stage.work`)."""
    seconds: float | None
    """Predicted time; None if no comparable run was recorded on this machine."""


def steps_of(recipe: Recipe, folder: Path, context: Context) -> Iterator[PlannedStep]:
    """Yields the prediction for every step, in order, with what a run folder already holds."""
    yield from looked_up(predicted(recipe, context), folder, context)


def predicted(recipe: Recipe, context: Context) -> list[PlannedStep]:
    """Returns the prediction for every step of a run that starts from nothing, without times: `looked_up` adds those."""
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    checked = check_model(recipe.model, num_classes(context.task, context.data.labels), context.max_length, tokenizer)
    config, size = checked.config, count(checked.config, context.task, context.max_length)
    steps, macs = plan_steps(recipe), size.macs
    behind = lines(steps)
    variants: dict[str, Variant] = {}
    sizes: dict[str, Counts] = {}
    planned: list[PlannedStep] = []
    for step in steps:
        if (named := input_named(step)) is not None:
            name = next(iter(variants)) if named == "baseline" else named
            config, size, macs = variants[name].config, sizes[name], sizes[name].macs
        work, after = step.work(macs, context.data), step.config_after(config)
        if after is not config:
            config, size = after, count(after, context.task, context.max_length)
        made_by: tuple[Stage, ...] = ()
        if is_variant(step, steps):
            made_by = tuple(stage for stage in behind[str(step.id)] if is_variant(stage, steps))
            variants[str(step.id)], sizes[str(step.id)] = Variant(config, made_by), size
        macs = size.macs if isinstance(step, Evaluate) else macs  # as in a run: from the last evaluation
        made = size if step.PRODUCES == "checkpoint" else None
        disk = predicted_bytes(step, config, variants, context)
        planned.append(PlannedStep(step, None, made, config, made_by, disk, work, None))
    return planned


def looked_up(planned: Sequence[PlannedStep], folder: Path, context: Context) -> Iterator[PlannedStep]:
    """Yields the steps with their artifacts in a run folder, as far as these are there from the first step on, and with the times of the
    others, predicted from what has run until now."""
    steps, state, chain = [entry.step for entry in planned], RunState(), True
    for entry in planned:
        state = state.before(entry.step) if chain else state
        found = _find(entry.step, state, context, folder) if chain else None
        chain = found is not None
        if found is not None:
            yield replace(entry, cached=found, disk_bytes=found.size_bytes, seconds=0.0)
        else:
            reuses = entry.step.reuses(state.context_so_far(context))
            yield replace(entry, seconds=durations.predict(entry.step.NAME, entry.work, reuses=reuses))
        state = state.after(entry.step, found, variant=is_variant(entry.step, steps)) if found else state


def _find(step: Stage, state: RunState, context: Context, folder: Path) -> Artifact | None:
    key = cache_key(step, state.parent, state.context_for(step, context))
    try:
        found = artifact.load(folder / "stages" / f"{step.id}-{key[:8]}")
    except DamagedArtifact:
        return None
    return found if found.key == key else None
