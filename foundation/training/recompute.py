"""Activation checkpointing: a training keeps less of the forward pass, and computes it again while backward needs it.

    none        everything that autograd keeps stays until backward has used it
    full        only the input of each block stays; backward runs the block once more (Chen et al. 2016, https://arxiv.org/abs/1604.06174)
    selective   the results of matrix products and of attention stay too, so that the second run has only cheap operations
                (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198)
    int8        nothing is computed again: what is kept has 8 bits (`foundation.training.saved_int8`)

The blocks are the encoder's and the decoder's (`foundation.models.architecture.blocks`). torch.utils.checkpoint runs them, in its
non-reentrant
form: it restores the random state of dropout, so that losses and gradients stay the same, and its graph is the usual one, so that
`DistributedDataParallel`, `fully_shard` and hooks that capture internals see one forward pass. Hooks on a block itself run outside of it.

Two things would happen twice and are kept from it: keys and values that a decoder appends to its cache (`use_cache` is off meanwhile), and
running means of batch norms. Autocast casts weights anew for each use: a cast that the first run found in autocast's cache would be missing
when the second run looks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foundation.core.errors import InputError, Problem
from foundation.core.target import Checkpointing
from foundation.labels.tasks import Task
from foundation.models.architecture.blocks import blocks_of, stacks_of, with_layers
from foundation.models.architecture.shapes import auto_class, on_meta
from foundation.models.forward import without_cache
from foundation.models.library import REFUSED, on_meta_else_cpu, one_line, quiet, uninitialized, with_class
from foundation.models.meta import on_meta_device
from foundation.models.size import inputs_of
from foundation.training.forwards import wrapped_forward
from foundation.training.saved_int8 import saved_in_int8

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]

_aten = torch.ops.aten
PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._int_mm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose results `selective` keeps."""


def caches_casts(kind: Checkpointing) -> bool:
    """Whether autocast may cast a weight once for all of its uses: the second run of a block would miss the first one's cast."""
    return kind in ("none", "int8")


@contextmanager
def recomputed(model: nn.Module, kind: Checkpointing, key: str) -> Iterator[None]:
    """Within the block, what the blocks of a model compute is not kept for backward but computed again, or kept in 8 bits.

    Args:
        model: A Transformers model, sharded or not; its blocks are as before afterwards.
        kind: What is kept.
        key: Key path in the recipe, for the message.

    Raises:
        InputError: The model has no repeated blocks (`foundation.models.architecture.blocks.stacks_of`).
    """
    if kind == "none":
        yield
        return
    if kind == "int8":
        with saved_in_int8(model):
            yield
        return
    blocks = list(blocks_of(model, key).values())
    contexts = partial(_contexts, kind)
    with wrapped_forward(blocks, lambda block: _again(block.forward, partial(contexts, block))), without_cache(model):
        yield


def check_recomputed(config: PreTrainedConfig, task: Task, length: int, kind: Checkpointing, key: str) -> None:
    """Checks before the first stage that the blocks of a model can be computed again, by training its first block for one step.

    It runs on the meta device; models that look at values run on the CPU, with weights that are not initialized.

    Args:
        config: Transformers config of the model.
        task: The task.
        length: Tokens of a row.
        kind: What is kept.
        key: Key path of the stage, for the message.

    Raises:
        InputError: The model has no repeated blocks, or a block does not do the same twice.
    """
    if caches_casts(kind):  # nothing runs twice
        return
    given = Problem("parallel.checkpointing", f"{kind} given for {key}")
    named = with_class(config, task)
    small = with_layers(named, [stack.first for stack in stacks_of(on_meta(named), str(given))])
    try:
        changed = on_meta_else_cpu(lambda meta: _changed_twice(small, task, length, kind, meta=meta))
    except REFUSED as error:
        said = f"the blocks of this {config.model_type} do not do the same twice ({one_line(error)})"
        raise InputError.of([given.because(said, f"give {'full, or none' if kind == 'selective' else 'none'}")]) from error
    if changed:
        reason = f"{changed[0]} of this {config.model_type} changes in every forward pass, so twice in a step"
        raise InputError.of([given.because(reason, "give none")])


def _changed_twice(config: PreTrainedConfig, task: Task, length: int, kind: Checkpointing, *, meta: bool) -> list[str]:
    """Trains a model without values for a step; returns the buffers of its blocks that change, except buffers of batch norms."""

    with torch.random.fork_rng(devices=[]), on_meta_device() if meta else uninitialized(), quiet():
        model: PreTrainedModel = auto_class(task, config).from_config(config).train()
        features = inputs_of(config, task, length, masked=not meta)
        norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        blocks = tuple(f"{name}." for name in blocks_of(model, "model"))
        before = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers() if name.startswith(blocks)}
        with recomputed(model, kind, "model"):
            model(**features).logits.float().sum().backward()
    after = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers() if name in before}
    return [name for name, state in after.items() if state != before[name] and not (norms and name.startswith(norms))]


def _again(forward: Callable[P, R], contexts: Callable[[], Contexts]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        found: R = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)  # type: ignore[arg-type]
        return found

    return run


def _contexts(kind: Checkpointing, block: nn.Module) -> Contexts:
    """Returns the context of the first run of a block, and of its second run."""
    if kind == "full":
        return nullcontext(), _second(block, nullcontext())
    first, second = create_selective_checkpoint_contexts(PRODUCTS)  # type: ignore[no-untyped-call]
    return first, _second(block, second)


@contextmanager
def _second(block: nn.Module, inner: AbstractContextManager[object]) -> Iterator[None]:
    """Within the block, batch norms leave their running means as they are."""
    with norms_at_rest(block), inner:
        yield


@contextmanager
def norms_at_rest(model: nn.Module) -> Iterator[None]:
    """Within the block, the batch norms of a model normalize as they do in a training but leave their running means as they are."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0  # running <- 1 * running + 0 * new
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count
