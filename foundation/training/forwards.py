"""Replaces the forward pass of modules for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def wrapped_forward(modules: Sequence[nn.Module], wrap: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Within the block, each module has another forward pass; afterwards it has its own again.

    Args:
        modules: The modules.
        wrap: Returns the new forward pass of a module, which still has the old one.
    """
    before = [module.__dict__.get("forward") for module in modules]  # where processes share tokens there is one
    for module in modules:
        module.forward = wrap(module)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):  # `unshard` may have replaced the modules, not these objects
            if forward is None:
                del module.forward
            else:
                module.forward = forward
