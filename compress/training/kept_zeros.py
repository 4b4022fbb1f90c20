"""Zeros that stay: a sparse model keeps the zeros of its weights through every later training.

The config of its checkpoint says `compress_keep_zeros: true`; `prune.sparsify.sparsify` writes that, and whatever is saved afterwards says
it too. A second `sparsify` fills none of them. A training that starts from such a model takes the zeros it finds in the linear layers of
the blocks as a mask, and masks gradients:

    M = 1[W != 0] at the start,    g <- g * M

AdamW moves a weight whose gradients have always been 0 by its decay alone, and 0 decays to 0, so that nothing has to be masked but
gradients. Which weights are 0 is read off the weights themselves: a stage that cuts the model smaller in between needs to know nothing of
it. Left out: zeros outside of the blocks (embeddings, pooler, head) and of weights that are no linear layers, such as stacked experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

NOTE = "compress_keep_zeros"


def keep_zeros(model: nn.Module) -> None:
    """Writes into the config of a model that its zeros have to stay."""
    config: Any = model.config
    setattr(config, NOTE, True)


def keeps_zeros(model: nn.Module) -> bool:
    """Returns whether the config of a model says that its zeros have to stay."""
    return bool(getattr(getattr(model, "config", None), NOTE, False))


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers inside the repeated blocks, the entries of any `nn.ModuleList`, by module name."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith(inside)}


@contextmanager
def zeros_held(model: nn.Module) -> Iterator[None]:
    """Keeps the zeros that a model has now where they are, for as long as the block lasts; does nothing where its config says nothing."""
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
