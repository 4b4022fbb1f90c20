"""What autograd keeps of a forward pass until the backward pass, counted by running the model on tensors without memory.

The model of the config runs in torch's FakeTensorMode, so that kernels, casts and architecture are those of a training. With activation
checkpointing: what stays of every block, and what is kept inside the largest one, which is there again meanwhile. Devices that share layers
and tokens send nothing here: what would come from the others is as large as the own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.core.errors import InputError
from compress.core.target import Checkpointing
from compress.core.tasks import TASKS, Task
from compress.models.architecture.blocks import blocks_of
from compress.models.architecture.sequence import share_tokens
from compress.models.architecture.shapes import auto_class, on_meta
from compress.models.architecture.split import Split, shrink, split_of
from compress.models.architecture.stages import Stages, run_stage
from compress.models.layers.conv1d import with_linears
from compress.models.layers.token_shares import Group
from compress.models.library import quiet, uninitialized, with_class
from compress.models.meta import empty_caches, on_meta_device
from compress.models.size import inputs_of
from compress.training.lora import Lora, attached
from compress.training.losses.table import losses_of
from compress.training.recompute import PRODUCTS

TRANSIENT = 2
"""Tensors as large as the largest kept one that the backward pass holds beside them."""


@contextmanager
def without_memory(
    config: Any, task: Task, tensor: int = 1, *, sequence: bool = False, if_shared: bool = False, lora: Lora | None = None
) -> Iterator[nn.Module]:
    """Yields the model of a config, whose tensors have no memory; within the block it runs all the same, and so do other tensors.

    Args:
        config: Transformers config.
        task: The task.
        tensor: Devices that share each layer: of these it has the part of one.
        sequence: Whether they share the tokens between layers too.
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
                shrink(with_linears(model), split)
                if sequence:
                    share_tokens(model, split, Group(tensor))
            if lora is not None:
                with on_meta_device():
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


def kept_in_stages(
    model: nn.Module, stages: Stages, features: Mapping[str, torch.Tensor], task: Task, checkpointing: Checkpointing, half: bool
) -> list[int]:
    """Returns the bytes that autograd keeps of each stage for a micro-batch.

    Args:
        model: A model whose tensors have no memory.
        stages: Its stages.
        features: Features of the rows of a micro-batch.
        task: The task.
        checkpointing: What is kept of the blocks.
        half: Whether it computes in bfloat16.
    """
    blocks = [model.get_submodule(name) for name in stages.blocks]
    sizes: list[int] = []
    states: torch.Tensor | None = None
    for span in stages.spans:
        kept = _Kept({tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *features.values())})
        counted = [_Block(block, kept, checkpointing) for block in blocks] if checkpointing != "none" else []
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=checkpointing == "none"):
                states = run_stage(model.forward, blocks, span, stages.form, states, features)
            if span.stop == len(blocks):
                _loss_of_text(task, states)
        again = max((_with_moment(block.inner.sizes) for block in counted), default=0)
        sizes.append(_with_moment(kept.sizes) + again)
        states = states.detach().requires_grad_(True)
        for block, wrapped in zip(blocks, counted, strict=False):
            block.forward = wrapped.forward
    return sizes


def rows_of(config: Any, task: Task, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Returns features of so many rows, each of `length` tokens."""
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


Counted = dict[tuple[int, Checkpointing, int, bool], list[Phase]]


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
    sequence: bool = False,
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
        sequence: Whether they share the tokens between layers too.
        lora: Adapters that are trained instead of the weights.
    """
    with without_memory(config, task, tensor, sequence=sequence, lora=lora) as model:
        model.train()
        features = rows_of(config, task, rows, length)
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
