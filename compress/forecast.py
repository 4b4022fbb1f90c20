"""Predicts sizes, times and memory of a run without reading weights: for `compress plan`, and for the price of candidates of a search.

Parameters and FLOPs are counted on the meta device by the function that also counts finished checkpoints. Times follow from the speed of
the machine and earlier runs on it (`compress.run.expected`, `compress.run.durations`), memory from shapes and earlier runs
(`compress.run.memory`). A step is cached only if all steps before it are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from compress.recipe import Recipe
from compress.run import durations
from compress.run.cache import cache_key
from compress.run.disk import Variant, default_builds, predicted_bytes, scratch_bytes
from compress.run.durations import NO_TIME, Expected
from compress.run.expected import parts_of
from compress.run.implicit import is_variant
from compress.run.inputs import mean_share
from compress.run.memory import engine_count, memory_of
from compress.run.pace import seconds_of_one
from compress.run.room import Room, Shortage, shortage
from compress.run.sharing import Offer
from compress.run.speed import speed
from compress.run.state import RunState
from compress.run.steps import plan_steps
from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact, DamagedArtifact
from foundation.core.errors import InputError
from foundation.core.step_names import BASELINE
from foundation.labels.tasks import num_classes
from foundation.models.importing import check_model
from foundation.models.inputs.tokenizer import resolve_tokenizer
from foundation.models.library import depths_of
from foundation.models.size import Counts, Passes, count
from foundation.stage.context import Context
from foundation.stage.stage import REUSED, Stage, input_named, lines

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


UNKNOWN_DEPTH = 12
"""Layers of a model whose config does not state them."""


@dataclass(frozen=True)
class PlannedStep:
    """The prediction for one step."""

    step: Stage
    cached: Artifact | None
    """Its artifact, if this step and all steps before it are cached; of one in the store only the manifest can be read."""
    size: Counts | None
    """Parameters and MACs of its checkpoint; None for a step that makes no checkpoint."""
    config: PreTrainedConfig
    """Transformers config of the model after this step."""
    lineage: tuple[Stage, ...]
    """The stages that lead to its checkpoint, from the baseline on, itself last; empty for a step that makes no checkpoint."""
    disk_bytes: int
    work: float
    """Multiply-accumulates (`Stage.work`)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Work of each part of the time (`compress.run.expected`)."""
    memory_bytes: int = 0
    """Predicted memory at the peak of the step, with all of its processes; earlier runs correct it (`durations.predicted_memory`)."""
    reuses: bool = False
    """Whether it will take parts from earlier runs."""
    stored: bool = False
    """Whether its artifact is in the store of the recipe, and not in the run folder."""
    scratch_bytes: int = 0
    """Disk space that it takes besides while it runs."""
    expected: Expected | None = None
    """The predicted time with its range; None until it is looked up."""

    @property
    def seconds(self) -> float | None:
        """The predicted time; None until it is looked up."""
        return None if self.expected is None else self.expected.seconds


def steps_of(recipe: Recipe, folder: Path, context: Context, offer: Offer | None = None) -> Iterator[PlannedStep]:
    """Yields the prediction for every step, in order, with what a run folder and a store already hold."""
    yield from looked_up(predicted(recipe, context), folder, context, offer)


def predicted(recipe: Recipe, context: Context) -> list[PlannedStep]:
    """Returns the prediction for every step of a run that starts from nothing, without times: `looked_up` adds those."""
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    checked = check_model(recipe.model, num_classes(context.task, context.data.labels), context.max_length, tokenizer)
    config, size = checked.config, count(checked.config, context.task, context.max_length)
    steps, first = plan_steps(recipe), size
    padded = mean_share(recipe.model, checked.config, tokenizer, context)
    behind = lines(steps)
    variants: dict[str, Variant] = {}
    sizes: dict[str, Counts] = {}
    planned: list[PlannedStep] = []
    for step in steps:
        alias = {BASELINE: next(iter(variants))} if variants else {}
        if (named := input_named(step)) is not None:
            name = alias.get(named, named)
            config, size = variants[name].config, sizes[name]
        before, layers = size.macs, sum(depths_of(config) or (UNKNOWN_DEPTH,))
        models = {name: variant.config for name, variant in variants.items()}
        placed = step.among({**models, **{name: models[own] for name, own in alias.items()}}, config)
        after = placed.config_after(config)
        if after is not config:
            config, size = after, count(after, context.task, context.max_length)
        work = placed.work(Passes(before, size.macs, layers), context.data)
        lineage: tuple[Stage, ...] = ()
        if is_variant(step, steps):
            lineage = tuple(stage for stage in behind[str(step.id)] if is_variant(stage, steps))
            variants[str(step.id)], sizes[str(step.id)] = Variant(config, lineage), size
        made = size if step.PRODUCES == "checkpoint" else None
        disk = predicted_bytes(step, config, variants, context)
        parts = parts_of(step, padded * work, size.macs, config, padded, disk, variants, context)
        engines = engine_count(len(default_builds(variants, context)) if variants else 0, context)
        memory = memory_of(step, size, first, config, engines, context)
        scratch = scratch_bytes(step, config, context)
        planned.append(PlannedStep(step, None, made, config, lineage, disk, work, parts, memory, scratch_bytes=scratch))
    return planned


def looked_up(planned: Sequence[PlannedStep], folder: Path, context: Context, offer: Offer | None = None) -> Iterator[PlannedStep]:
    """Yields the steps with their artifacts in a run folder or a store, as far as these are there from the first step on, and with the
    times of the others, predicted from what has run until now."""
    steps, state, chain = [entry.step for entry in planned], RunState(context), True
    known = speed(context.target.num_threads)
    for entry in planned:
        state = state.before(entry.step) if chain else state
        found, stored = _find(entry.step, state, folder, offer) if chain else (None, False)
        chain = found is not None
        if found is not None:
            yield replace(
                entry, cached=found, stored=stored, disk_bytes=found.size_bytes, scratch_bytes=0, expected=NO_TIME, memory_bytes=0
            )
        else:
            reuses = entry.step.reuses(state.context)
            name = entry.step.NAME
            expected = durations.predict(name, entry.parts, seconds_of_one(name, known), reuses=reuses)
            yield replace(entry, expected=expected, reuses=reuses)
        state = state.after(entry.step, found, variant=is_variant(entry.step, steps)) if found else state


def _find(step: Stage, state: RunState, folder: Path, offer: Offer | None) -> tuple[Artifact | None, bool]:
    """Returns the artifact of a step, and whether it is in the store alone."""
    key = cache_key(step, state.parent, state.context_for(step))
    try:
        found = artifact.load(folder / "stages" / f"{step.id}-{key[:8]}")
        if found.key == key:
            return found, False
    except DamagedArtifact:
        pass  # not there
    stored = None if offer is None else offer.find(step, key)
    return stored, stored is not None


def lacks(planned: Sequence[PlannedStep], room: Room) -> Shortage:
    """Returns the shortages of disk and memory for the steps that are not cached."""
    todo = [entry for entry in planned if entry.cached is None]
    memory = {str(entry.step.id): durations.predicted_memory(entry.step.NAME, entry.memory_bytes) for entry in todo}
    scratch = max((entry.scratch_bytes for entry in todo), default=0)  # a step removes its own before the next one starts
    return shortage(sum(entry.disk_bytes for entry in todo) + scratch, memory, room)


@dataclass
class Outlook:
    """Predictions for the steps of a run: disk and memory are checked before the first step that runs, and its use is recorded.

    Args:
        recipe: The recipe.
        context: The context of the first step.
        folder: The run folder.
    """

    recipe: Recipe
    context: Context
    folder: Path
    _is_checked: bool = field(default=False, init=False)

    @cached_property
    def planned(self) -> dict[str, PlannedStep]:
        """The steps by id; predicted when the first of them runs, as a run whose steps are all cached needs no prediction."""
        return {str(entry.step.id): entry for entry in predicted(self.recipe, self.context)}

    def check(self, step: Stage) -> None:
        """Checks, when the first step runs, that disk and memory suffice for all remaining steps; warns if that is uncertain.

        Raises:
            InputError: They do not suffice.
        """
        if self._is_checked:
            return
        self._is_checked = True
        ids = list(self.planned)
        short = lacks([self.planned[name] for name in ids[ids.index(str(step.id)) :]], Room.here(self.folder))
        for line in short.warned:
            self.context.progress.warn(str(line))
        if short.refused:
            raise InputError.of(short.refused)

    def record(self, step: Stage, seconds: float, artifact: Artifact, memory_bytes: int) -> None:
        """Records the time and memory of a finished step."""
        entry, busy = self.planned[str(step.id)], durations.others_running(self.context.target.num_threads)
        memory = (entry.memory_bytes, memory_bytes) if memory_bytes else None
        reused = bool(artifact.metrics.get(REUSED))
        durations.record(step.NAME, entry.parts, seconds, reused=reused, busy=busy, memory=memory)
