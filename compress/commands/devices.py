"""`compress plan --devices 8x80GB`: whether each training fits on them and what to change, and how each model is served on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from compress.devices.served import BITS, Division, Load, Model, Precision, plan
from compress.devices.spec import Devices, devices, shown_bytes
from compress.devices.traffic import describe as describe_traffic
from compress.devices.traffic import parts_of
from compress.devices.trained import FLOAT, PARALLEL, Needed, Training, proposal
from compress.forecast import PlannedStep
from compress.recipe import Recipe
from compress.run.prepare import checked_with
from distill.distill import Distill
from export.divided.folder import expert_layers
from export.divided.placement import place
from export.export import Export
from foundation.core.errors import InputError
from foundation.machine.parallel import Team
from foundation.models.library import with_class
from foundation.schemes.table import SCHEMES
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from foundation.training.settings import TrainingSettings
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from quantize.training.planned import int8_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
    first = next(step.config for step in planned if step.config is not None)
    arguments = {str(stage.id): (stage, config, teacher) for stage, config, teacher in checked_with(recipe, first, context)}
    for entry in planned:
        lines += [f"{entry.step.id}: {line}" for line in _training(entry, arguments, first, context, given)]
    lines.append(f"serving: {_load_in_words(_load(recipe, context, streams), context)}")
    exported = next((entry for entry in planned if isinstance(entry.step, Export)), None)
    last = [entry for entry in planned if entry.lineage and entry is not exported][-1]
    model = Model(last.config, _precision(last.lineage), context.facts.generates)
    found = plan(model, _load(recipe, context, streams), given)
    lines.append(f"  {last.step.id} in {model.precision}: {found.division or 'does not fit'}")
    lines += [f"  {reason}" for reason in found.reasons]
    return [*lines, *_placement(found.division, last)]


def _placement(division: Division | None, last: PlannedStep) -> Iterator[str]:
    """Describes how busy the devices of a mixture are, if its experts are dealt out and an earlier run measured their load."""
    if division is None or division.experts == 1:
        return
    found = place(last.cached.metrics if last.cached is not None else {}, expert_layers(last.config), division.experts)
    if found.busiest is None:
        yield "  the load of the experts is not measured yet: run the stages before export, and plan again"
        return
    yield (
        f"  placed by their measured load, experts give the busiest device {found.busiest:.2f} times the tokens of the mean, "
        f"{found.busiest_in_order:.2f} times in order"
    )
    for name, placement in found.placements.items():
        yield f"    {name}: {' | '.join(' '.join(map(str, experts)) for experts in placement)}"


def _training(
    entry: PlannedStep,
    arguments: Mapping[str, tuple[Stage, PreTrainedConfig, PreTrainedConfig | None]],
    first: PreTrainedConfig,
    context: Context,
    devices: Devices,
) -> Iterator[str]:
    """Describes how a step trains, if it does.

    Args:
        entry: The step.
        arguments: Every stage by id, with the configs that it is checked with.
        first: Config of the first model.
        context: The context of the run.
        devices: The devices.
    """
    settings = settings_of(entry.step)
    if settings is None:
        return
    learns = not isinstance(entry.step, Finetune)
    names = ("tensor", "context", "experts", "pipeline")
    shares: dict[str, Any] = {name: getattr(context.parallel, name) for name in names} if devices.count > 1 else {}
    training = Training(
        entry.config,
        context.task,
        settings.batch_size,
        getattr(settings, "micro_batch_size", None),
        context.max_length,
        teacher=first if learns and getattr(settings, "distill", True) else None,
        soft_weight=getattr(settings, "soft_weight", 0.5) if not getattr(settings, "named", False) else 0.5,
        keeps_best=getattr(settings, "keep", "best") == "best",
        strategy=context.parallel.strategy,
        sequence=context.parallel.sequence and devices.count > 1,
        **shares,
        schedule=context.parallel.schedule,
        microbatches=context.parallel.microbatches,
        checkpointing=context.parallel.checkpointing,
        offload=context.parallel.offload,
        optimizer=settings.optimizer.name,
        lora=None if isinstance(entry.step, Quantize) else getattr(settings, "lora", None),
        changes=int8_layers(entry.step.qat, entry.step.exclude) if isinstance(entry.step, Quantize) else None,
    )
    refused = partial(_refused, *arguments[str(entry.step.id)], context, devices.count)
    problem = refused(training)
    if problem is not None:
        yield f"does not run on {devices.count} device{'s' * (devices.count > 1)} like this: {problem}"
        return
    found = proposal(training, devices, lambda proposed: refused(proposed) is None)
    last = found.training
    team = Team(0, devices.count, last.strategy, last.tensor, last.pipeline, last.sequence, last.context, last.experts)
    shown = f"{devices.count} devices by {team.plan}"
    shown = shown if devices.count > 1 else "one device"
    short = "" if found.fits else f": {shown_bytes(devices.usable)} are not enough, whatever is changed"
    yield f"trains on {shown}, {_parts(found.needed)}{short}"
    if found.fits and found.changes:
        yield f"with {', '.join(found.changes)}; without, it does not fit"
    if found.fits and found.reason is not None:
        yield found.reason
    if last.tensor > 1:
        yield from _traffic(entry, last, devices)


def _traffic(entry: PlannedStep, training: Training, devices: Devices) -> list[str]:
    """Compares the shapes of meshes that could share the layers of a step that trains."""
    from foundation.models.architecture.shapes import on_meta

    parts = parts_of(on_meta(with_class(training.config, training.task)), str(entry.step.id))
    return describe_traffic(parts, training.batch_size * training.length, devices.count, FLOAT)


def _refused(
    stage: Stage, incoming: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context, count: int, training: Training
) -> str | None:
    """Returns why a stage does not take the settings of a training, or does not train on all devices with them; None if it does."""
    if context.parallel.gradients != "float32" and training.divides:
        return f"parallel.gradients: {context.parallel.gradients} given, which needs whole gradients"
    parallel = context.parallel.model_copy(update={name: getattr(training, name) for name in PARALLEL})
    try:
        team = stage.team(parallel.of(Team(0, count)))
    except InputError as error:
        return "; ".join(error.lines)
    if team.size != count:
        return "only one process trains"
    try:
        _with_rows(stage, training.micro_batch_size).check(incoming, teacher, replace(context, parallel=parallel, team=team))
    except InputError as error:
        return "; ".join(error.lines)
    return None


def _with_rows(stage: Stage, rows: int | None) -> Stage:
    """Returns a stage with another `micro_batch_size`."""
    settings = settings_of(stage)
    assert settings is not None, "only a stage that trains is asked for another size"
    changed = settings.model_copy(update={"micro_batch_size": rows})
    if isinstance(stage, Finetune | Distill):
        return cast("Stage", changed)
    return stage.model_copy(update={"qat" if isinstance(stage, Quantize) else "recover": changed})


def settings_of(stage: Stage) -> TrainingSettings | None:
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
    many = streams or (8 if context.facts.generates else max(recipe.target.batch_sizes))
    return Load(many, context.max_length, min(limits, default=None))


def _load_in_words(load: Load, context: Context) -> str:
    limit = "" if load.latency_ms is None else f", at most {load.latency_ms:g} ms"
    if context.facts.generates:
        return f"{load.streams} answers at once of {load.length} tokens each, prompts included{limit}"
    return f"batches of {load.streams} rows of {load.length} tokens{limit}"


def _parts(needed: Needed) -> str:
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations": needed.activations,
        "gathered": needed.gathered,
        "on the host": needed.host,
    }
    shown = ", ".join(f"{name} {shown_bytes(size)}" for name, size in parts.items() if size)
    return f"{shown_bytes(needed.peak)} each at the peak: {shown}"
