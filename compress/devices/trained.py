"""What training takes on each device, and the smallest change that makes it fit.

    weights      4 bytes each, the model's and a teacher's; twice the model's where the best ones are kept
    gradients    4 bytes for each trained weight
    optimizer    8 bytes for each trained weight (AdamW: two moments)
    activations  what autograd keeps for a backward pass of the rows of a device, and two tensors as large as the largest of them, which the
                 backward pass holds for a moment. Counted, not estimated: the model of the config runs on tensors without memory
                 (torch's FakeTensorMode), so that kernels, casts and architecture are those of the training.
    gathered     fsdp2: two blocks whole at a time, and what lies outside of blocks

The peak is weights + optimizer + gathered + max(activations, gradients): the activations go as the gradients come. Where gradients are
accumulated over micro-batches they are there during the next forward pass, so that both count. fsdp2 divides weights, gradients and
optimizer by the processes.

What is tried, the first that fits: the recipe as it is (rows dealt out to the devices), smaller micro-batches, fsdp2, and both.

Not counted: the integer copies of quantization-aware training, logits of a teacher that are cached, and the context of the driver, for
which a tenth of the memory is left free."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compress.core.tasks import TASKS, Task
from compress.devices.given import Devices
from compress.machine.parallel import Strategy
from compress.models.blocks import blocks_of
from compress.models.library import quiet, with_class
from compress.models.meta import empty_caches
from compress.models.shapes import auto_class
from compress.models.size import inputs_of
from compress.training.losses.table import losses_of

FLOAT = 4
MOMENTS = 8
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

    @property
    def peak(self) -> int:
        """The most at one time."""
        varying = self.activations + self.gradients if self.accumulates else max(self.activations, self.gradients)
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


def needed(training: Training, processes: int) -> Needed:
    """Returns what a training takes on each of some devices; see the top of this file.

    Args:
        training: The training.
        processes: Devices, one process on each.
    """
    share = math.ceil(training.batch_size / processes)
    rows = min(share, training.micro_batch_size or share)
    with _without_memory(training.config, training.task) as model:
        own, blocks = numel(model), [numel(block) for block in blocks_of(model, "model").values()]
    taught = 0
    if training.teacher is not None:
        with _without_memory(training.teacher, training.task) as model:
            taught = numel(model)
    divided = processes if training.strategy == "fsdp2" else 1
    gathered = FLOAT * (2 * max(blocks) + own - sum(blocks)) if divided > 1 else 0
    return Needed(
        weights=FLOAT * (own * (1 + training.keeps_best) + taught) // divided,
        gradients=FLOAT * own // divided,
        optimizer=MOMENTS * own // divided,
        activations=kept_for_backward(training.config, training.task, rows, training.length, half=training.half),
        gathered=gathered,
        accumulates=rows < share,
    )


def kept_for_backward(config: Any, task: Task, rows: int, length: int, *, half: bool) -> int:
    """Returns the bytes that autograd keeps of a forward pass and its loss, with what the backward pass adds for a moment.

    Args:
        config: Transformers config.
        task: The task; of text that is generated the loss is counted too, whose logits are large.
        rows: Rows of the pass.
        length: Tokens of each.
        half: Whether it computes in bfloat16, the weights being cast once.
    """
    with _without_memory(config, task) as model:
        model.train()
        features = {name: value.expand(rows, *value.shape[1:]).contiguous() for name, value in inputs_of(config, task, length).items()}
        known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *features.values())}
        storages: dict[int, int] = {}
        alive: list[torch.Tensor] = []  # a storage that is freed could come again under the same number

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                storages[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = model(**features).logits
            if TASKS[task].generates:
                labels = torch.zeros(rows, logits.shape[1] - 1, dtype=torch.int32)
                losses_of(task).labelled(logits.float(), labels)
    return sum(storages.values()) + TRANSIENT * max(storages.values(), default=0)


def numel(module: nn.Module) -> int:
    """Returns the number of parameters of a module; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def proposals(training: Training, processes: int) -> Iterator[Training]:
    """Yields what is tried, the smallest change first."""
    yield training
    share = math.ceil(training.batch_size / processes)
    sizes = [size for size in (2**power for power in range(share.bit_length() - 1, -1, -1)) if size < (training.micro_batch_size or share)]
    yield from (replace(training, micro_batch_size=size) for size in sizes)
    if processes > 1 and training.strategy != "fsdp2":
        sharded = replace(training, strategy="fsdp2")
        yield sharded
        yield from (replace(sharded, micro_batch_size=size) for size in sizes)


def proposal(training: Training, given: Devices) -> Proposal:
    """Returns the first of `proposals` that fits on the devices, or the last one where none does."""
    tried = Proposal(training, needed(training, given.count), False, ())
    for each in proposals(training, given.count):
        taken = needed(each, given.count)
        tried = Proposal(each, taken, taken.peak <= given.usable, tuple(_changes(training, each)))
        if tried.fits:
            break
    return tried


def _changes(before: Training, after: Training) -> Iterator[str]:
    if after.micro_batch_size != before.micro_batch_size:
        yield f"micro_batch_size: {after.micro_batch_size}"
    if after.strategy != before.strategy:
        yield f"parallel: {{strategy: {after.strategy}}}"


@contextmanager
def _without_memory(config: Any, task: Task) -> Iterator[nn.Module]:
    """Yields the model of a config, whose tensors have no memory; within the block it runs all the same, and so do other tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    changed = copy.deepcopy(config)
    changed.use_cache = False
    empty_caches()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            with no_init_weights(), quiet():
                model: Any = auto_class(task, changed).from_config(with_class(changed, task))
            model.tie_weights()
            yield model
    finally:
        empty_caches()
