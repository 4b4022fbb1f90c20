"""`compress plan --devices 8x80GB`: whether each training fits on them and what to change, and how each model is served on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compress.core.tasks import TASKS
from compress.devices.given import Devices, devices, shown_bytes
from compress.devices.served import BITS, Load, Model, Precision, plan
from compress.devices.trained import Needed, Training, proposal
from compress.forecast import PlannedStep
from compress.recipe import Recipe
from compress.schemes.table import SCHEMES
from compress.stage.context import Context
from compress.stage.stage import Stage
from compress.training.finetune import Finetune
from distill.distill import Distill
from export.export import Export
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize


def describe(recipe: Recipe, planned: Sequence[PlannedStep], context: Context, text: str, streams: int | None) -> list[str]:
    """Returns the lines about devices.

    Args:
        recipe: The recipe.
        planned: Its steps.
        context: Its context.
        text: The devices as given.
        streams: Answers at once of a language model, or rows of a batch; None: 8, or the largest batch of the target.

    Raises:
        InputError: The devices are written in no known way.
    """
    given = devices(text)
    lines = [f"devices: {given.count} of {shown_bytes(given.memory)} ({shown_bytes(given.usable)} usable each), linked by {given.link}"]
    for entry in planned:
        lines += [f"{entry.step.id}: {line}" for line in _training(entry, planned, recipe, context, given)]
    lines.append(f"serving: {_asked(_load(recipe, context, streams), context)}")
    exported = next((entry for entry in planned if isinstance(entry.step, Export)), None)
    last = [entry for entry in planned if entry.made_by and entry is not exported][-1]
    model = Model(last.config, _precision(last.made_by), TASKS[context.task].generates)
    found = plan(model, _load(recipe, context, streams), given)
    lines.append(f"  {last.step.id} in {model.precision}: {found.division or 'does not fit'}")
    return [*lines, *(f"  {reason}" for reason in found.reasons)]


def _training(entry: PlannedStep, planned: Sequence[PlannedStep], recipe: Recipe, context: Context, given: Devices) -> Iterator[str]:
    settings: Any = settings_of(entry.step)
    if settings is None:
        return
    first = next(step.config for step in planned if step.config is not None)
    learns = not isinstance(entry.step, Finetune)
    training = Training(
        entry.config,
        context.task,
        settings.batch_size,
        getattr(settings, "micro_batch_size", None),
        context.max_length,
        teacher=first if learns else None,
        keeps_best=getattr(settings, "keep", "best") == "best",
        strategy=recipe.parallel.strategy,
    )
    found = proposal(training, given)
    shown = f"{given.count} devices by {found.training.strategy}" if given.count > 1 else "one device"
    short = "" if found.fits else f": {shown_bytes(given.usable)} are not enough, whatever is changed"
    yield f"trains on {shown}, {_parts(found.needed)}{short}"
    if found.fits and found.changes:
        yield f"with {', '.join(found.changes)}; without, it does not fit"


def settings_of(stage: Stage) -> Any:
    """Returns the settings by which a stage trains; None where it does not."""
    if isinstance(stage, Finetune | Distill):
        return stage
    if isinstance(stage, Prune | Sparsify):
        return stage.recover
    return stage.qat if isinstance(stage, Quantize) and stage.mode != "ptq" else None


def _precision(stages: Sequence[Stage]) -> Precision:
    schemes = [stage.scheme for stage in stages if isinstance(stage, Quantize)]
    bits = SCHEMES[schemes[-1]].weight_bits if schemes else 16
    return next(name for name, known in BITS.items() if known <= bits)


def _load(recipe: Recipe, context: Context, streams: int | None) -> Load:
    limits = [goal.value for goal in recipe.goals.max_latency_ms]
    many = streams or (8 if TASKS[context.task].generates else max(recipe.target.batch_sizes))
    return Load(many, context.max_length, min(limits, default=None))


def _asked(load: Load, context: Context) -> str:
    limit = "" if load.latency_ms is None else f", at most {load.latency_ms:g} ms"
    if TASKS[context.task].generates:
        return f"{load.streams} answers at once of {load.length} tokens each, prompts included{limit}"
    return f"batches of {load.streams} rows of {load.length} tokens{limit}"


def _parts(needed: Needed) -> str:
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations": needed.activations,
        "gathered": needed.gathered,
    }
    shown = ", ".join(f"{name} {shown_bytes(size)}" for name, size in parts.items() if size)
    return f"{shown_bytes(needed.peak)} each at the peak: {shown}"
