"""Kept zeros: a sparse model keeps its zero weights through all later training.

`prune.sparsify.sparsify` writes `compress_keep_zeros: true` into the config of its checkpoint; later checkpoints inherit it, and a second
`sparsify` keeps the zeros too. A training that starts from such a model uses the zeros in the linear layers of the blocks as a mask on the
gradients:

    M = 1[W != 0] at the start,    g <- g * M

Masking gradients suffices: with zero gradients AdamW only applies weight decay, and 0 decays to 0. The mask is read from the weights, so a
stage that shrinks the model in between needs no special handling. Not covered: zeros outside the blocks (embeddings, pooler, head) and in
weights that are not linear layers, such as stacked experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

NOTE = "compress_keep_zeros"


def keep_zeros(model: nn.Module) -> None:
    """Marks in the config of a model that its zeros must be kept."""
    config: Any = model.config
    setattr(config, NOTE, True)


def keeps_zeros(model: nn.Module) -> bool:
    """Whether the config of a model says that its zeros must be kept."""
    return bool(getattr(getattr(model, "config", None), NOTE, False))


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers inside the repeated blocks, the entries of any `nn.ModuleList`, by module name."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith(inside)}


@contextmanager
def zeros_held(model: nn.Module) -> Iterator[None]:
    """Keeps the current zeros of a model within the `with` block, if its config says so."""
    handles = []
    if keeps_zeros(model):
        for layer in block_linears(model).values():
            mask_OI = layer.weight.detach() != 0
            if layer.weight.requires_grad and not bool(mask_OI.all()):
                handles.append(layer.weight.register_hook(_masking(mask_OI)))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masking(mask_OI: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient_OI: gradient_OI * mask_OI
