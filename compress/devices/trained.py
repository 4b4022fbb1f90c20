"""What training takes on each device, and the smallest change that makes it fit.

    weights      4 bytes each, the model's and a teacher's; twice the model's where the best ones are kept and the model is divided. Of a
                 whole model the best weights lie in the memory of the host.
    gradients    4 bytes for each trained weight: all of them, or those of adapters (`lora`) and of the head
    optimizer    8 bytes for each trained weight (AdamW and LAMB: two moments), 2 with moments of 8 bits; Adafactor: 4 for each row and
                 column of a matrix
    activations  what autograd keeps for a backward pass of the rows of a device, and two tensors as large as the largest of them, which the
                 backward pass holds for a moment. Counted, not estimated: the model of the config runs on tensors without memory
                 (torch's FakeTensorMode), so that kernels, casts and architecture are those of the training. With activation
                 checkpointing: what stays of every block, and all that is kept of the largest one, which is there again meanwhile.
    gathered     fsdp2: two units whole at a time, which are blocks, embedding and output layer, and all of what lies outside of them
    tensor       processes that share each layer have a part of its weights and activations, and more rows: the model that is counted has
                 the layers of one of them. What lies outside of blocks stays whole.
    pipeline     a process has its stages alone, whose activations are counted for a micro-batch and taken for as many as are between
                 forward and backward at one time: N - s in stage s of N with 1f1b. Hidden states and gradients that are received have a
                 place for every micro-batch. Gradients are there during forward passes. The process that takes most is told.
    host         what `offload` moves to the memory of the host: shards, their gradients and the optimizer. On the device are the units
                 that run, and the gradient of one.

The peak is weights + optimizer + gathered + max(activations, gradients): the activations go as the gradients come. Where gradients are
accumulated over micro-batches they are there during the next forward pass, so that both count. fsdp2 divides weights, gradients and
optimizer by the processes; gradients that accumulate are whole.

What is tried, the first that fits: the recipe as it is (rows dealt out to the devices), smaller micro-batches, activation checkpointing
(selective, then full, then full with smaller micro-batches), the same with fsdp2, and the same with offload. Over NVLink devices share each
layer before the host holds anything: 2 of them, 4, up to all. Over PCIe, which carries four sums of activations for each layer slowly,
they do where offload does not help. What the stage refuses is not tried.

Not counted: the integer copies of quantization-aware training, logits of a teacher that are cached, and the context of the driver, for
which a tenth of the memory is left free."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.core.errors import InputError
from compress.core.target import Checkpointing, Parallel, Schedule
from compress.core.tasks import TASKS, Task
from compress.devices.given import Devices, Link
from compress.machine.parallel import Strategy
from compress.models.architecture.blocks import blocks_of
from compress.models.architecture.shapes import auto_class, on_meta
from compress.models.architecture.split import Split, shrink, split_of
from compress.models.architecture.stages import Stages, run_stage, stages_of
from compress.models.forward import without_cache
from compress.models.layers.conv1d import with_linears
from compress.models.library import quiet, uninitialized, with_class
from compress.models.meta import empty_caches, on_meta_device
from compress.models.size import inputs_of
from compress.training.division import ends_of
from compress.training.lora import Lora, attached
from compress.training.losses.table import losses_of
from compress.training.optimizers import OptimizerName, moment_bytes
from compress.training.recompute import PRODUCTS

FLOAT = 4
KINDS: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Of activation checkpointing, the one that keeps most first."""
PARALLEL = ("strategy", "tensor", "checkpointing", "offload")
"""What a proposal may change in the section `parallel`."""
TRANSIENT = 2
"""Tensors as large as the largest kept one that the backward pass holds beside them."""


@dataclass(frozen=True)
class Training:
    """A stage that trains."""

    config: Any
    """Transformers config of the model."""
    task: Task
    batch_size: int
    """Rows of a step, over all devices."""
    micro_batch_size: int | None
    """Rows on a device at once; None: all of its share."""
    length: int
    """Tokens of a row."""
    teacher: Any = None
    """Config of a teacher that runs beside it, or None."""
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
    lora: Lora | None = None
    """Adapters that are trained instead of the weights."""
    pipeline: int = 1
    """Devices that hold consecutive blocks."""
    schedule: Schedule = "1f1b"
    microbatches: int | None = None

    @property
    def divides(self) -> bool:
        """Whether several devices hold parts of the model."""
        return self.strategy == "fsdp2" or self.tensor > 1 or self.pipeline > 1


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


def needed(training: Training, processes: int, counted: Counted | None = None) -> Needed:
    """Returns what a training takes on each of some devices; see the top of this file.

    Args:
        training: The training.
        processes: Devices, one process on each.
        counted: Activations of the same model that are known already, by rows and what is kept; new ones are added.
    """
    if training.pipeline > 1:
        return _needed_in_stages(training, processes)
    counted = {} if counted is None else counted
    groups = processes // training.tensor
    share = math.ceil(training.batch_size / groups)
    rows = min(share, training.micro_batch_size or share)
    with _without_memory(training.config, training.task, training.tensor, lora=training.lora) as model:
        parts = [*blocks_of(model, "model").values(), *ends_of(model)]
        own, units = numel(model), [numel(part) for part in parts]
        trained, widest = numel(model, trained=True), max(numel(part, trained=True) for part in parts)
        moments = moment_bytes(training.optimizer, (parameter for parameter in model.parameters() if parameter.requires_grad))
    taught = 0
    if training.teacher is not None:
        with _without_memory(training.teacher, training.task, training.tensor, if_shared=True) as model:
            taught = numel(model)
    kind = rows, training.checkpointing, training.tensor
    if kind not in counted:
        counted[kind] = phases_of_backward(
            training.config,
            training.task,
            rows,
            training.length,
            half=training.half,
            checkpointing=training.checkpointing,
            tensor=training.tensor,
            lora=training.lora,
        )
    sharded = processes > 1 and training.strategy == "fsdp2"
    divided = groups if sharded else 1
    gathers = sharded or (training.tensor > 1 and groups > 1)  # between groups, `ddp` is `fully_shard` too
    gathered = FLOAT * (2 * max(units) + own - sum(units)) if gathers else 0
    accumulates = rows < share
    best = FLOAT * trained * training.keeps_best
    here = best if processes > 1 and training.divides else 0
    weights, gradients, moments = (FLOAT * (own + taught) + here) // divided, FLOAT * trained // divided, moments // divided
    there = 0 if training.offload and sharded else 1
    passing = gradients if not sharded else FLOAT * trained if accumulates else FLOAT * widest if training.offload else gradients
    return Needed(
        weights=there * weights,
        gradients=passing,
        optimizer=there * moments,
        activations=max(phase.kept for phase in counted[kind]),
        gathered=gathered,
        accumulates=accumulates,
        together=max(phase.kept + there * FLOAT * phase.trained // divided for phase in counted[kind]),
        host=(1 - there) * (weights + gradients + moments) + best - here,
    )


def _needed_in_stages(training: Training, processes: int) -> Needed:
    """Returns what a pipeline takes on the device that takes most."""
    section = Parallel(pipeline=training.pipeline, schedule=training.schedule, microbatches=training.microbatches)
    share = math.ceil(training.batch_size * training.pipeline / processes)
    at_once = min(share, training.micro_batch_size or share)
    parts = section.parts(at_once)
    rows = math.ceil(at_once / parts)
    taught = 0
    if training.teacher is not None:
        with _without_memory(training.teacher, training.task) as model:
            taught = numel(model)
    found: list[Needed] = []
    with _without_memory(training.config, training.task) as model, without_cache(model):
        features = _rows_of(training.config, training.task, rows, training.length)
        stages = stages_of(model, features, training.pipeline * section.stages_each, "model", compare=False)
        kept = _kept_in_stages(model.train(), stages, features, training)
        message = FLOAT * math.prod(stages.shape(features))
        weights = dict(model.named_parameters())
        for process in range(training.pipeline):
            own_stages = range(process, len(stages), training.pipeline)
            own = [weight for name, weight in weights.items() if set(stages.holders(name)) & set(own_stages)]
            size, flying = FLOAT * sum(weight.numel() for weight in own), in_flight(process, parts, section)
            received = parts * message * sum((stage > 0) + (stage < len(stages) - 1) for stage in own_stages)
            found.append(
                Needed(
                    weights=size + FLOAT * taught,
                    gradients=size,
                    optimizer=moment_bytes(training.optimizer, own),
                    activations=flying * max(kept[stage] for stage in own_stages) + received,
                    accumulates=True,
                    host=size * training.keeps_best,
                )
            )
    return max(found, key=lambda needed: needed.peak)


def in_flight(process: int, parts: int, section: Parallel) -> int:
    """Returns how many micro-batches a process of a pipeline has between forward and backward at one time, each stage of it counted.

    Args:
        process: Index of the process.
        parts: Micro-batches of a step.
        section: The section of the recipe.
    """
    before_last = section.pipeline - 1 - process
    if section.schedule == "1f1b":
        return min(parts, before_last + 1)
    return min(section.stages_each * parts, (section.stages_each - 1) * section.pipeline + 2 * before_last + 1)


def _kept_in_stages(model: nn.Module, stages: Stages, features: Mapping[str, torch.Tensor], training: Training) -> list[int]:
    """Returns the bytes that autograd keeps of each stage for a micro-batch."""
    blocks = [model.get_submodule(name) for name in stages.blocks]
    sizes: list[int] = []
    states: torch.Tensor | None = None
    for span in stages.spans:
        kept = _Kept({tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *features.values())})
        counted = [_Block(block, kept, training.checkpointing) for block in blocks] if training.checkpointing != "none" else []
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=training.half, cache_enabled=training.checkpointing == "none"):
                states = run_stage(model.forward, blocks, span, stages.form, states, features)
            if span.stop == len(blocks):
                _loss_of_text(training.task, states)
        again = max((_with_moment(block.inner.sizes) for block in counted), default=0)
        sizes.append(_with_moment(kept.sizes) + again)
        states = states.detach().requires_grad_(True)
        for block, wrapped in zip(blocks, counted, strict=False):
            block.forward = wrapped.forward
    return sizes


def _rows_of(config: Any, task: Task, rows: int, length: int) -> dict[str, torch.Tensor]:
    return {name: value.expand(rows, *value.shape[1:]).contiguous() for name, value in inputs_of(config, task, length).items()}


def _loss_of_text(task: Task, logits: torch.Tensor) -> None:
    """Runs the loss of text that is generated, whose logits are large."""
    if TASKS[task].generates:
        labels = torch.zeros(len(logits), logits.shape[1] - 1, dtype=torch.int32)
        losses_of(task).labelled(logits.float(), labels)


@dataclass(frozen=True)
class Phase:
    """What is there at one time of a backward pass."""

    kept: int
    """Bytes of activations, with what the backward pass adds for a moment."""
    trained: int = 0
    """Weights whose gradient is complete."""


Counted = dict[tuple[int, Checkpointing, int], list[Phase]]


def kept_for_backward(config: Any, task: Task, rows: int, length: int, *, half: bool) -> int:
    """Returns the bytes that autograd keeps of a forward pass and its loss, with what the backward pass adds for a moment.

    The arguments are those of `phases_of_backward`.
    """
    return phases_of_backward(config, task, rows, length, half=half, checkpointing="none")[0].kept


def phases_of_backward(
    config: Any,
    task: Task,
    rows: int,
    length: int,
    *,
    half: bool,
    checkpointing: Checkpointing,
    tensor: int = 1,
    lora: Lora | None = None,
) -> list[Phase]:
    """Returns what is there when the backward pass starts, and while it computes each block again.

    Args:
        config: Transformers config.
        task: The task; of text that is generated the loss is counted too, whose logits are large.
        rows: Rows of the pass.
        length: Tokens of each.
        half: Whether it computes in bfloat16, the weights being cast once, or for each use with activation checkpointing.
        checkpointing: What is kept of the blocks.
        tensor: Devices that share each layer.
        lora: Adapters that are trained instead of the weights.
    """
    with _without_memory(config, task, tensor, lora=lora) as model:
        model.train()
        features = _rows_of(config, task, rows, length)
        kept = _Kept({tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *features.values())})
        blocks = [_Block(block, kept, checkpointing) for block in blocks_of(model, "model").values()] if checkpointing != "none" else []
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=checkpointing == "none"):
                logits = model(**features).logits
            _loss_of_text(task, logits)
        phases, done = [Phase(_with_moment(kept.sizes))], numel(model, trained=True) - sum(block.numel for block in blocks)
        for block in reversed(blocks):  # what came after it is gone by then
            phases.append(Phase(_with_moment({**block.before, **block.inner.sizes}), done))
            done += block.numel
    return phases


def _with_moment(sizes: Mapping[int, int]) -> int:
    """Returns the bytes of some storages, and of what the backward pass holds beside them."""
    return sum(sizes.values()) + TRANSIENT * max(sizes.values(), default=0)


class _Kept:
    """The storages that something keeps, each counted once.

    Args:
        known: Storages that do not count.
    """

    def __init__(self, known: Collection[int]) -> None:
        self.known, self.sizes = known, dict[int, int]()
        self.alive: list[torch.Tensor] = []  # a storage that is freed could come again under the same number

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor; returns it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.sizes[storage._cdata] = storage.nbytes()
            self.alive.append(tensor)
        return tensor


class _Block:
    """Counts apart what a block keeps that is computed again; its inputs stay, and with `selective` results of products.

    Args:
        block: The block, whose `forward` is replaced.
        outer: Counts what stays.
        kind: What is kept.
    """

    def __init__(self, block: nn.Module, outer: _Kept, kind: Checkpointing) -> None:
        self.forward, self.outer, self.inner, self.kind = block.forward, outer, _Kept(outer.known), kind
        self.numel = numel(block, trained=True)
        self.before: dict[int, int] = {}  # what stays when the block has run, by storage
        block.forward = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block."""
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self.outer.keep(tensor)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.inner.keep, lambda tensor: tensor)
        with hooks, _Products(self.outer) if self.kind == "selective" else nullcontext():
            result = self.forward(*args, **kwargs)
        self.before = dict(self.outer.sizes)
        return result


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the results of matrix products, which `selective` keeps."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.kept.keep(tensor)
        return result


def numel(module: nn.Module, trained: bool = False) -> int:
    """Returns the number of parameters of a module, or of those alone that are trained; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)


def proposals(training: Training, processes: int, link: Link = "pcie") -> Iterator[Training]:
    """Yields what is tried, the smallest change first."""
    for strategy, tensor, offload in plans(training, processes, link):
        whole = replace(training, strategy=strategy, tensor=tensor, offload=offload)
        share = math.ceil(training.batch_size * tensor * training.pipeline / processes)
        powers = (2**power for power in range(share.bit_length() - 1, -1, -1))
        sizes = [size for size in powers if size < min(share, training.micro_batch_size or share)]
        yield whole
        yield from (replace(whole, micro_batch_size=size) for size in sizes)
        stronger = KINDS[KINDS.index(training.checkpointing) + 1 :]
        yield from (replace(whole, checkpointing=kind) for kind in stronger)
        yield from (replace(whole, checkpointing="full", micro_batch_size=size) for size in sizes if stronger)


def plans(training: Training, processes: int, link: Link) -> list[tuple[Strategy, int, bool]]:
    """Returns strategy, devices that share each layer, and offload: those of a training, then what divides more, the cheapest first."""
    own = training.strategy, training.tensor, training.offload
    if processes == 1 or training.pipeline > 1:
        return [own]
    sharing = [2**power for power in range(1, processes.bit_length()) if processes % 2**power == 0]
    shared: list[tuple[Strategy, int, bool]] = [("fsdp2", tensor, False) for tensor in sharing if tensor > training.tensor]
    host: list[tuple[Strategy, int, bool]] = [("fsdp2", training.tensor, True)]
    later = [*shared, *host] if link == "nvlink" else [*host, *shared]
    known: list[tuple[Strategy, int, bool]] = [("fsdp2", training.tensor, False), *later]
    return [own, *known[known.index(own) + 1 :]] if own in known else [own, *known]


def proposal(training: Training, given: Devices, runs: Callable[[Training], bool] = lambda training: True) -> Proposal:
    """Returns the first of `proposals` that fits on the devices, or the one that takes least where none does.

    Args:
        training: The training as the recipe has it.
        given: The devices.
        runs: Whether the stage takes the settings of a proposal; those that it refuses are left out.
    """
    counted: Counted = {}
    least: Proposal | None = None
    for each in proposals(training, given.count, given.link):
        if least is not None and not runs(each):
            continue
        taken = needed(each, given.count, counted)
        if least is None or taken.peak < least.needed.peak:
            least = Proposal(each, taken, taken.peak <= given.usable, tuple(_changes(training, each)))
        if least.fits:
            break
    assert least is not None, "the recipe as it is comes first"
    return least


def _changes(before: Training, after: Training) -> Iterator[str]:
    if after.micro_batch_size != before.micro_batch_size:
        yield f"micro_batch_size: {after.micro_batch_size}"
    settings = {name: getattr(after, name) for name in PARALLEL if getattr(after, name) != getattr(before, name)}
    if settings:
        yield f"parallel: {{{', '.join(f'{name}: {str(value).lower()}' for name, value in settings.items())}}}"


@contextmanager
def _without_memory(config: Any, task: Task, tensor: int = 1, *, if_shared: bool = False, lora: Lora | None = None) -> Iterator[nn.Module]:
    """Yields the model of a config, whose tensors have no memory; within the block it runs all the same, and so do other tensors.

    Args:
        config: Transformers config.
        task: The task.
        tensor: Devices that share each layer: of these it has the part of one.
        if_shared: Whether it is whole where they cannot, as a teacher then is.
        lora: Adapters that are put on its layers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    changed = copy.deepcopy(config)
    changed.use_cache = False
    split = _split(config, task, tensor, if_shared) if tensor > 1 else None
    empty_caches()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            # peft moves its adapters, which tensors without memory do not allow, but those of the meta device do
            with nullcontext() if lora is None else on_meta_device(), uninitialized(), quiet():
                model: Any = auto_class(task, changed).from_config(with_class(changed, task))
            model.tie_weights()
            if split is not None:
                shrink(model, split)
            if lora is not None:
                with torch.device("meta"):
                    attached(with_linears(model), lora, "model")
                _from_meta(model)
                model.tie_weights()
            yield model
    finally:
        empty_caches()


def _from_meta(model: nn.Module) -> None:
    """Puts the tensors of a model of the meta device on the CPU, in place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            made = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(made, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def _split(config: Any, task: Task, tensor: int, if_shared: bool) -> Split | None:
    try:
        return split_of(on_meta(with_class(config, task)), tensor, "model")
    except InputError:
        if not if_shared:
            raise
        return None
