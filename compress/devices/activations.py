"""Counts the activations of a training step by running it on tensors without memory (`compress.devices.alive`).

Forward pass, loss and backward pass of the model of the config, so that kernels, casts and architecture are as in a training; blocks are
computed again where activation checkpointing asks for it, layers that learn in int8 and adapters are in their places, and the logits of a
teacher exist next to the activations of the model. Devices that share layers or tokens send nothing here: what would come from the others
is as large as the own. Not counted: losses that compare more than logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from compress.devices.alive import Alive
from foundation.core.errors import InputError
from foundation.core.target import Checkpointing
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.context import share_context
from foundation.models.architecture.sequence import share_tokens
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.architecture.split import Split, shrink, split_of
from foundation.models.architecture.stages import Stages, run_stage
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.own_answers import answering
from foundation.models.layers.token_shares import Group
from foundation.models.library import quiet, uninitialized, with_class
from foundation.models.meta import empty_caches, on_meta_device
from foundation.models.size import inputs_of
from foundation.training.few_parameters.lora import Lora, attached
from foundation.training.losses.table import losses_of
from foundation.training.recompute import caches_casts, recomputed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Changes = Callable[[nn.Module], None]
"""Change that a stage makes to a model before it trains, in place."""
TEMPERATURE = 2.0


@dataclass(frozen=True)
class Step:
    """A forward and a backward pass."""

    config: PreTrainedConfig
    """Transformers config of the model."""
    task: Task
    """The task; of text that is generated the loss is counted too, whose logits are large."""
    rows: int
    length: int
    """Tokens of each row."""
    half: bool
    """Whether it computes in bfloat16, the weights being cast once, or for each use with activation checkpointing."""
    checkpointing: Checkpointing = "none"
    tensor: int = 1
    """Devices that share each layer."""
    sequence: bool = False
    """Whether they share the tokens between layers too."""
    context: int = 1
    """Devices that share the tokens of each row, and hold whole layers."""
    lora: Lora | None = None
    """Adapters that are trained instead of the weights."""
    changes: Changes | None = None
    teacher: Any = None
    """Config of a teacher, or None."""
    soft_weight: float = 0.5
    """Weight of its logits in the loss; the labels have the rest."""


@contextmanager
def _grouped_products_of_any_type() -> Iterator[None]:
    """Lets experts of a mixture multiply by an operation of Transformers, which keeps the same tensors for backward.

    torch 2.13 says of its own what the product of bfloat16 on a GPU takes, and refuses the float32 weights of a training, which it
    multiplies on every device (findings/torch_grouped_mm_without_values.sh).
    """
    from transformers.integrations import moe

    before = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *tensors: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before


@contextmanager
def without_memory(
    config: PreTrainedConfig,
    task: Task,
    tensor: int = 1,
    *,
    sequence: bool = False,
    context: int = 1,
    if_shared: bool = False,
    lora: Lora | None = None,
    changes: Changes | None = None,
) -> Iterator[nn.Module]:
    """Yields the model of a config in training mode, whose tensors have no memory; within the block it runs all the same, and so do others.

    Args:
        config: Transformers config.
        task: The task.
        tensor: Devices that share each layer: of these it has the part of one.
        sequence: Whether they share the tokens between layers too.
        context: Devices that share the tokens of each row.
        if_shared: Whether it is whole where they cannot, as a teacher then is.
        lora: Adapters that are put on its layers.
        changes: What is done to it before it trains.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    changed = copy.deepcopy(config)
    changed.use_cache = False
    split = _split(config, task, tensor, if_shared) if tensor > 1 else None
    empty_caches()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _grouped_products_of_any_type():
            # peft moves its adapters, which tensors without memory do not allow, but tensors of the meta device do
            with nullcontext() if lora is None else on_meta_device(), uninitialized(), quiet():
                model: PreTrainedModel = auto_class(task, changed).from_config(with_class(changed, task))
            model.tie_weights()
            if split is not None:
                shrink(with_linears(model), split)
                if sequence:
                    share_tokens(model, split, Group(tensor))
            if lora is not None:
                with on_meta_device():
                    attached(with_linears(model), lora, "model")
                _from_meta(model)
                model.tie_weights()
            model.train()
            if changes is not None:
                changes(model)
            if context > 1:
                share_context(model, Group(context))
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


def _split(config: PreTrainedConfig, task: Task, tensor: int, if_shared: bool) -> Split | None:
    try:
        return split_of(on_meta(with_class(config, task)), tensor, "model")
    except InputError:
        if not if_shared:
            raise
        return None


class Held(NamedTuple):
    """Bytes of a pipeline stage for one micro-batch."""

    saved: int
    """Stored between forward and backward."""
    moment: int
    """Additional peak during the backward pass."""


def bytes_of_stages(
    model: nn.Module, stages: Stages, features: Mapping[str, torch.Tensor], task: Task, checkpointing: Checkpointing, half: bool
) -> list[Held]:
    """Returns the bytes that each stage holds of a micro-batch.

    Args:
        model: A model whose tensors have no memory.
        stages: Its stages.
        features: Features of the rows of a micro-batch.
        task: The task.
        checkpointing: What blocks store for backward.
        half: Whether it computes in bfloat16.
    """
    blocks = [model.get_submodule(name) for name in stages.blocks]
    sizes: list[Held] = []
    states: torch.Tensor | None = None
    for span in stages.spans:
        given = [] if states is None else [states]
        known = (*model.parameters(), *model.buffers(), *features.values(), *given)
        with recomputed(model, checkpointing, "model"), Alive(known, _trained(model)) as alive:
            with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=caches_casts(checkpointing)):
                states = run_stage(model.forward, blocks, span, stages.form, states, features)
            ends = span.stop == len(blocks)
            loss = _loss(task, states.float(), False, 0.0) if ends else states.sum()
            kept = alive.now
            loss.backward()  # type: ignore[no-untyped-call]
        sizes.append(Held(kept, max(alive.peaks.values()) - kept))
        states = states.detach().requires_grad_(True)
        model.zero_grad()
    return sizes


def rows_of(config: PreTrainedConfig, task: Task, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Returns features of so many rows, each of `length` tokens."""
    return {name: value.expand(rows, *value.shape[1:]).contiguous() for name, value in inputs_of(config, task, length).items()}


def _loss(task: Task, logits: torch.Tensor, taught: bool, soft_weight: float) -> torch.Tensor:
    """Returns the loss of logits, float32; of text that is generated as `foundation.training.distillation.distilled` computes it."""
    if not TASKS[task].generates:
        return logits.sum()
    losses, labels = losses_of(task), torch.zeros(len(logits), logits.shape[1] - 1, dtype=torch.int32)
    if not taught:
        return losses.labelled(logits, labels).sum()
    target = torch.empty_like(logits, requires_grad=False)
    parts = [losses.labelled(logits, labels)] if soft_weight < 1 else []
    parts += [losses.taught(logits, target, labels, TEMPERATURE)] if soft_weight else []
    return torch.stack(parts).sum()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Phase:
    """Memory at one time of a backward pass."""

    saved: int
    """Peak of live bytes, without complete gradients."""
    trained: int = 0
    """Weights whose gradient is complete."""


Counted = dict[tuple[int, Checkpointing, int, bool, int], list[Phase]]


def phases_of_backward(step: Step) -> list[Phase]:
    """Returns the peak bytes of the forward pass, and of the backward pass after each gradient."""
    taught = 0 if step.teacher is None else _of_teacher(step)
    with without_memory(
        step.config, step.task, step.tensor, sequence=step.sequence, context=step.context, lora=step.lora, changes=step.changes
    ) as model:
        features = rows_of(step.config, step.task, step.rows, step.length)
        known = (*model.parameters(), *model.buffers(), *features.values())
        with recomputed(model, step.checkpointing, "model"), Alive(known, _trained(model)) as alive:
            with answering(Group(step.context) if step.context > 1 else None):
                with torch.autocast("cpu", torch.bfloat16, enabled=step.half, cache_enabled=caches_casts(step.checkpointing)):
                    logits = model(**features).logits.float()
                alive.meanwhile(taught)
                loss = _loss(step.task, logits, step.teacher is not None, step.soft_weight)
            del logits
            loss.backward()  # type: ignore[no-untyped-call]
    return [Phase(kept, trained) for trained, kept in alive.peaks.items()]


def _of_teacher(step: Step) -> int:
    """Returns the most bytes that a teacher takes while it answers."""
    answers = answering(Group(step.context) if step.context > 1 else None)
    with without_memory(step.teacher, step.task, step.tensor, context=step.context, if_shared=True) as model, torch.no_grad(), answers:
        model.eval().requires_grad_(False)
        features = rows_of(step.teacher, step.task, step.rows, step.length)
        known = (*model.parameters(), *model.buffers(), *features.values())
        alive = Alive(known)
        with alive, torch.autocast("cpu", torch.bfloat16, enabled=step.half):
            model(**features).logits.float()
    return max(alive.peaks.values())


def numel(module: nn.Module, trained: bool = False) -> int:
    """Returns the number of parameters of a module, or of those alone that are trained; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)
