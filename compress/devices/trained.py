"""Predicts the memory of a training on each device, and the smallest change that makes it fit.

    weights      4 bytes each, the model's and a teacher's; twice the model's where the best ones are kept and the model is divided. Of a
                 whole model the best weights are in host memory.
    gradients    4 bytes for each trained weight: all weights, or the weights of adapters (`lora`) and of the head
    optimizer    8 bytes for each trained weight (AdamW and LAMB: two moments), 4 with LARS, 2 with moments of 8 bits; Adafactor: 4 for each
                 row and column of a matrix
    activations  the most that a step on the rows of a device holds besides these: what autograd keeps, what the loss makes of the logits
                 (and of a teacher's), and what functions hold for a moment. Counted, not estimated (`compress.devices.activations`): the
                 model of the config trains on tensors without memory, with its int8 layers or adapters and activation checkpointing. An
                 int8 layer that learns keeps its input and its weight, which is there anyway; codes and slopes are there for a moment.
    gathered     fsdp2: two units whole at a time, which are blocks, embedding and output layer, and everything outside of them
    tensor       processes that share each layer have a part of its weights and activations, and more rows: the model that is counted has
                 the layers of one of them. Everything outside of blocks stays whole.
    sequence     these processes share the tokens between the layers of blocks too: all that a block keeps is divided by their number
    context      processes share the tokens of each row: blocks hold activations of their own tokens, and for a moment keys and values of
                 all tokens; everything outside of blocks sees all tokens. Weights are replicated, or sharded over all processes by fsdp2.
    experts      processes that spread the experts of a mixture have a part of their weights, gradients and moments, which fsdp2 does
                 not divide further. Tokens on their way to experts are not counted.
    pipeline     a process has only its stages, whose activations are counted for a micro-batch and taken for as many as are between
                 forward and backward at one time, stage by stage: N - s in stage s of N with 1f1b. Hidden states and gradients that are
                 received have a place for every micro-batch. Gradients are there during forward passes. The process that takes most counts.
    host         what `offload` moves to the memory of the host: shards, their gradients and the optimizer. On the device are the units
                 that run, and the gradient of one.

The peak is weights + optimizer + gathered + max(activations, gradients): the activations go as the gradients come. Where gradients are
accumulated over micro-batches they are there during the next forward pass, so that both count; so they are where `ddp` sums them, whose
buckets have their places from the start. fsdp2 divides weights, gradients and
optimizer by the processes; gradients that accumulate are whole.

What is tried, the first that fits: the recipe as it is (rows dealt out to the devices), smaller micro-batches, activation checkpointing
(selective, then full, then full with smaller micro-batches), then the same with each of these plans in turn:

    NVLink   fsdp2, layers that 2, 4, up to all devices share, a pipeline of 2, 4, up to all, offload, tokens that 2, 4, up to all share
    PCIe     fsdp2, a pipeline, offload, shared layers, shared tokens: four sums of activations for each layer are slow there, hidden
             states between stages are not

A pipeline gathers nothing: its first stage has all of 1 / N of the blocks and keeps activations of N micro-batches, where fsdp2 has two
whole units at a time. What the stage refuses is not tried: layers are not shared where the number of devices does not divide their heads.

Not counted: losses of a distillation that compare more than logits, int8 experts of a mixture, and the context of the driver, for which a
tenth of the memory is left free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from compress.devices.activations import Changes, Counted, Step, bytes_of_stages, numel, phases_of_backward, rows_of, without_memory
from compress.devices.spec import Devices, Link
from foundation.core.target import Checkpointing, Parallel, Schedule
from foundation.labels.tasks import Task
from foundation.machine.parallel import Strategy
from foundation.models.architecture.blocks import blocks_of
from foundation.models.architecture.stages import stages_of
from foundation.models.forward import without_cache
from foundation.models.layers.experts import is_stacked
from foundation.models.layers.listed_experts import is_listed, keep_first
from foundation.models.library import sizes_config
from foundation.training.choices import OptimizerName
from foundation.training.few_parameters.lora import Lora
from foundation.training.optimizers import moment_bytes
from foundation.training.processes.division import ends_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOAT = 4
KINDS: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Settings of activation checkpointing; the first keeps most activations."""
PARALLEL = ("strategy", "tensor", "context", "pipeline", "checkpointing", "offload")
"""Keys of the section `parallel` that a proposal may change."""


@dataclass(frozen=True)
class Training:
    """A stage that trains."""

    config: PreTrainedConfig
    """Transformers config of the model."""
    task: Task
    batch_size: int
    """Rows of a step, over all devices."""
    micro_batch_size: int | None
    """Rows on a device at once; None: all of its share."""
    length: int
    """Tokens of a row."""
    teacher: Any = None
    """Config of a teacher that runs next to it, or None."""
    soft_weight: float = 0.5
    """Weight of the teacher's logits in the loss; the labels have the rest."""
    keeps_best: bool = True
    """Whether a copy of the best weights is kept."""
    half: bool = True
    """Whether it computes in bfloat16."""
    strategy: Strategy = "ddp"
    checkpointing: Checkpointing = "none"
    offload: bool = False
    optimizer: OptimizerName = "adamw"
    tensor: int = 1
    """Devices that share each layer."""
    sequence: bool = False
    """Whether these share the tokens between layers too."""
    context: int = 1
    """Devices that share the tokens of each row."""
    lora: Lora | None = None
    """Adapters that are trained instead of the weights."""
    experts: int = 1
    """Devices that spread the experts of a mixture."""
    pipeline: int = 1
    """Devices that hold consecutive blocks."""
    schedule: Schedule = "1f1b"
    microbatches: int | None = None
    changes: Changes | None = None
    """Changes to the model before it trains, such as inserting int8 layers."""

    @property
    def divides(self) -> bool:
        """Whether several devices hold parts of the model."""
        return self.strategy == "fsdp2" or self.tensor > 1 or self.pipeline > 1 or self.experts > 1


@dataclass(frozen=True)
class Needed:
    """Bytes on each device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0
    accumulates: bool = False
    """Whether gradients are there during the forward pass."""
    together: int = 0
    """With activation checkpointing: the most that activations and the gradients that are there already take at one time."""
    host: int = 0
    """Bytes of the host's memory for each process: what `offload` moves there, and the best weights of a model that is not divided."""

    @property
    def peak(self) -> int:
        """The most at one time."""
        varying = self.activations + self.gradients if self.accumulates else max(self.activations, self.gradients, self.together)
        return self.weights + self.optimizer + self.gathered + varying


@dataclass(frozen=True)
class Proposal:
    """How a training fits."""

    training: Training
    """As it should run."""
    needed: Needed
    fits: bool
    changes: tuple[str, ...]
    """Settings of the recipe that differ, `key: value`."""
    reason: str | None = None
    """Why a pipeline is proposed; None where none is."""


class Sizes(NamedTuple):
    """Numbers of weights of a model or, where devices share its layers, of the part of one device."""

    own: int
    units: tuple[int, ...]
    """Parameters of each block and end of the model."""
    trained: int
    widest: int
    """Parameters of the block, embedding or output layer with the most trained parameters."""
    moments: int
    """Bytes that the optimizer keeps."""
    taught: int
    """Parameters of a teacher."""
    spread: int = 0
    """Of `own`, those in experts that devices spread: strategies do not divide them further."""
    spread_trained: int = 0
    """Of these, the trained ones."""
    spread_moments: int = 0
    """Bytes that the optimizer keeps for them."""


@dataclass(frozen=True)
class Known:
    """Counts of one model; plans for it differ in rows and in how devices share it."""

    phases: Counted = field(default_factory=dict)
    sizes: dict[int, Sizes] = field(default_factory=dict)
    """By the number of devices that share each layer."""


def needed(training: Training, processes: int, known: Known | None = None) -> Needed:
    """Returns the memory that a training takes on each device; see the top of this file.

    Args:
        training: The training.
        processes: Devices, one process on each.
        known: What is known already of the same model, trained in the same way; what is counted for this plan is added.
    """
    if training.pipeline > 1:
        return max(in_stages(training, processes), key=lambda needed: needed.peak)
    known = Known() if known is None else known
    groups = processes // (training.tensor * training.context)
    share = math.ceil(training.batch_size / groups)
    rows = min(share, training.micro_batch_size or share)
    if training.tensor not in known.sizes:
        known.sizes[training.tensor] = _sizes(training)
    sizes = known.sizes[training.tensor]
    own, units, trained, widest, moments, taught = sizes[:6]
    kind, counted = (rows, training.checkpointing, training.tensor, training.sequence, training.context), known.phases
    if kind not in counted:
        names = (
            "config",
            "task",
            "length",
            "half",
            "checkpointing",
            "tensor",
            "sequence",
            "context",
            "lora",
            "changes",
            "teacher",
            "soft_weight",
        )
        counted[kind] = phases_of_backward(Step(rows=rows, **{name: getattr(training, name) for name in names}))
    sharded = processes > 1 and training.strategy == "fsdp2"
    divided = groups * training.context if sharded else 1
    gathers = sharded or (training.tensor > 1 and groups > 1)  # between groups, `ddp` is `fully_shard` too
    gathered = FLOAT * (2 * max(units) + own - sum(units)) if gathers else 0
    in_buckets = groups * training.context > 1 and training.tensor == 1 and not sharded
    accumulates = rows < share or in_buckets
    best = FLOAT * trained * training.keeps_best
    here = best if processes > 1 and training.divides else 0
    best_spread = FLOAT * sizes.spread_trained * training.keeps_best * (here > 0)
    weights = _divided(FLOAT * (own + taught) + here, FLOAT * sizes.spread + best_spread, divided)
    gradients = _divided(FLOAT * trained, FLOAT * sizes.spread_trained, divided)
    moments = _divided(moments, sizes.spread_moments, divided)
    there = 0 if training.offload and sharded else 1
    passing = gradients if not sharded else FLOAT * trained if accumulates else FLOAT * widest if training.offload else gradients
    return Needed(
        weights=there * weights,
        gradients=passing,
        optimizer=there * moments,
        activations=max(phase.saved for phase in counted[kind]),
        gathered=gathered,
        accumulates=accumulates,
        together=max(phase.saved + there * FLOAT * phase.trained // divided for phase in counted[kind]),
        host=(1 - there) * (weights + gradients + moments) + best - here,
    )


def _divided(whole: int, spread: int, processes: int) -> int:
    """Returns the bytes that a process has of `whole`, of which the bytes of spread experts are its own already."""
    return (whole - spread) // processes + spread


def _sizes(training: Training) -> Sizes:
    """Counts the weights of a training."""
    with without_memory(training.config, training.task, training.tensor, lora=training.lora, changes=training.changes) as model:
        apart = spread_among(model, training.experts)
        apart_trained = [weight for weight in apart if weight.requires_grad]
        spread = sum(weight.numel() for weight in apart), sum(weight.numel() for weight in apart_trained)
        spread_moments = moment_bytes(training.optimizer, apart_trained)
        parts = [*blocks_of(model, "model").values(), *ends_of(model)]
        own, units = numel(model), tuple(numel(part) for part in parts)
        trained, widest = numel(model, trained=True), max(numel(part, trained=True) for part in parts)
        moments = moment_bytes(training.optimizer, (parameter for parameter in model.parameters() if parameter.requires_grad))
    taught = 0
    if training.teacher is not None:
        with without_memory(training.teacher, training.task, training.tensor, if_shared=True) as model:
            taught = numel(model)
    return Sizes(own, units, trained, widest, moments, taught, *spread, spread_moments)


def spread_among(model: nn.Module, devices: int) -> list[nn.Parameter]:
    """Leaves the experts of one device in a model, in place; returns their weights, none where devices spread no experts."""
    if devices == 1:
        return []
    weights: list[nn.Parameter] = []
    for module in list(model.modules()):
        experts: Any = module
        if is_listed(module):
            keep_first(module, int(experts.num_experts) // devices)
            weights += module.parameters()
        elif is_stacked(module):
            for name, weight in list(module.named_parameters(recurse=False)):
                own = nn.Parameter(weight[: len(weight) // devices].detach(), requires_grad=weight.requires_grad)
                module.register_parameter(name, own)
                weights.append(own)
    return weights


def in_stages(training: Training, processes: int) -> list[Needed]:
    """Returns the memory that each process of a pipeline takes."""
    section = Parallel(pipeline=training.pipeline, schedule=training.schedule, microbatches=training.microbatches)
    share = math.ceil(training.batch_size * training.pipeline / processes)
    at_once = min(share, training.micro_batch_size or share)
    parts = section.parts(at_once)
    rows = math.ceil(at_once / parts)
    taught = 0
    if training.teacher is not None:
        with without_memory(training.teacher, training.task) as model:
            taught = numel(model)
    found: list[Needed] = []
    with without_memory(training.config, training.task, lora=training.lora, changes=training.changes) as model, without_cache(model):
        features = rows_of(training.config, training.task, rows, training.length)
        stages = stages_of(model, features, training.pipeline * section.stages_each, "model", compare=False)
        kept = bytes_of_stages(model, stages, features, training.task, training.checkpointing, training.half)
        message = FLOAT * math.prod(stages.shape(features))
        weights = dict(model.named_parameters())
        for process in range(training.pipeline):
            own_stages = range(process, len(stages), training.pipeline)
            own = [weight for name, weight in weights.items() if set(stages.stages_with(name)) & set(own_stages)]
            size = FLOAT * sum(weight.numel() for weight in own)
            held = (zip(flying, own_stages, strict=True) for flying in in_flight(process, parts, section))
            received = parts * message * sum((stage > 0) + (stage < len(stages) - 1) for stage in own_stages)
            found.append(
                Needed(
                    weights=size + FLOAT * taught,
                    gradients=size,
                    optimizer=moment_bytes(training.optimizer, own),
                    activations=max(sum(count * kept[stage].saved for count, stage in each) for each in held)
                    + max(kept[stage].moment for stage in own_stages)
                    + received,
                    accumulates=True,
                    host=size * training.keeps_best,
                )
            )
    return found


def in_flight(process: int, parts: int, section: Parallel) -> list[tuple[int, ...]]:
    """Returns after each forward pass of a process how many micro-batches of each of its stages are between forward and backward.

    Args:
        process: Index of the process.
        parts: Micro-batches of a step.
        section: The section of the recipe.
    """
    each, before_last = section.stages_each, section.pipeline - 1 - process
    passes = each * parts
    ahead = min(passes, before_last + 1 if section.schedule == "1f1b" else (each - 1) * section.pipeline + 2 * before_last + 1)
    flying, found = [0] * each, []
    for number in range(passes):
        flying[number // section.pipeline % each] += 1  # as many micro-batches as processes go through one stage, then through the next
        found.append(tuple(flying))
        if number + 1 >= ahead:  # from here on each forward pass is followed by a backward pass, the last stage first
            flying[each - 1 - (number + 1 - ahead) // section.pipeline % each] -= 1
    return found


def proposals(training: Training, processes: int, link: Link = "pcie") -> Iterator[Training]:
    """Yields the proposals to try, the smallest change first."""
    for plan in plans(training, processes, link):
        whole = replace(training, **plan._asdict())
        share = math.ceil(training.batch_size * plan.tensor * plan.pipeline * plan.context / processes)
        powers = (2**power for power in range(share.bit_length() - 1, -1, -1))
        sizes = [size for size in powers if size < min(share, training.micro_batch_size or share)]
        yield whole
        yield from (replace(whole, micro_batch_size=size) for size in sizes)
        again = "none" if training.checkpointing == "int8" else training.checkpointing  # which computes nothing again
        stronger = KINDS[KINDS.index(again) + 1 :]
        yield from (replace(whole, checkpointing=kind) for kind in stronger)
        yield from (replace(whole, checkpointing="full", micro_batch_size=size) for size in sizes if stronger)


class Plan(NamedTuple):
    """How devices share a training."""

    strategy: Strategy
    tensor: int = 1
    """Devices that share each layer."""
    pipeline: int = 1
    """Devices that hold consecutive blocks."""
    offload: bool = False
    context: int = 1
    """Devices that share the tokens of each row."""


def plans(training: Training, processes: int, link: Link) -> list[Plan]:
    """Returns the plan of a training, then those that divide more, the cheapest first."""
    own = Plan(training.strategy, training.tensor, training.pipeline, training.offload, training.context)
    if processes == 1 or training.pipeline > 1:
        return [own]
    if training.experts > 1:
        return [own] if training.strategy == "fsdp2" else [own, Plan("fsdp2")]
    many = [2**power for power in range(1, processes.bit_length()) if processes % 2**power == 0]
    blocks = int(sizes_config(training.config).num_hidden_layers)
    alone = training.tensor == training.context == 1
    shared = [Plan("fsdp2", tensor) for tensor in many if tensor > training.tensor and training.context == 1]
    stages = [Plan("ddp", pipeline=pipeline) for pipeline in many if pipeline <= blocks and alone]
    host = [Plan("fsdp2", training.tensor, offload=True, context=training.context)]
    tokens = [Plan("fsdp2", context=context) for context in many if context > training.context and training.tensor == 1]
    later = [*shared, *stages, *host] if link == "nvlink" else [*stages, *host, *shared]
    known = [Plan("fsdp2", training.tensor, context=training.context), *later, *tokens]
    return [own, *known[known.index(own) + 1 :]] if own in known else [own, *known]


def proposal(training: Training, devices: Devices, runs: Callable[[Training], bool] = lambda training: True) -> Proposal:
    """Returns the first of `proposals` that fits on the devices, or the one that takes least where none does.

    Args:
        training: The training as the recipe has it.
        devices: The devices.
        runs: Whether the stage takes the settings of a proposal; those that it refuses are left out.
    """
    known = Known()
    least: Proposal | None = None
    for each in proposals(training, devices.count, devices.link):
        if least is not None and not runs(each):
            continue
        taken = needed(each, devices.count, known)
        if least is None or taken.peak < least.needed.peak:
            least = Proposal(each, taken, taken.peak <= devices.usable, tuple(_changes(training, each)), _why(training, each, devices))
        if least.fits:
            break
    assert least is not None, "the recipe as it is comes first"
    return least


def _why(before: Training, after: Training, devices: Devices) -> str | None:
    """Explains why a pipeline is proposed; None if none is."""
    if after.pipeline == before.pipeline:
        return None
    shards = "shards (fsdp2), of which two units are whole at a time, do not fit"
    first = f"{after.pipeline} devices hold consecutive blocks each (pipeline): {shards}"
    if devices.link == "pcie":
        return f"{first}, and only hidden states go over PCIe, which is too slow for the sums of layers that devices share (tensor)"
    return f"{first}, and devices cannot share its layers (tensor), or that does not fit either"


def _changes(before: Training, after: Training) -> Iterator[str]:
    if after.micro_batch_size != before.micro_batch_size:
        yield f"micro_batch_size: {after.micro_batch_size}"
    settings = {name: getattr(after, name) for name in PARALLEL if getattr(after, name) != getattr(before, name)}
    if settings:
        yield f"parallel: {{{', '.join(f'{name}: {str(value).lower()}' for name, value in settings.items())}}}"
