"""Finds layers that no engine multiplies for a row: there is nothing to speed up and no GEMM in the graph, so they stay float.

constant   the input is made of weights only: the relative positions of Swin v2 and DeBERTa v2 go through layers of their own, whose
           results an engine computes once, when it loads the graph
unused     the output does not reach the logits: the last layout layer of LiLT, which the head does not read
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from foundation.models.meta import empty_caches
from foundation.schemes.scales import Layer

CONSTANT = "the same for every row: engines compute it once"
UNUSED = "its output does not reach the answer"
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


def constant_layers(model: nn.Module, layers: Mapping[str, Layer], features: Mapping[str, Tensor], forward: Forward) -> list[str]:
    """Returns the names of the layers whose inputs are the same for different rows.

    Args:
        model: The model.
        layers: Its layers by name.
        features: Features of some rows; if all rows are equal, no layer is said to be constant.
        forward: Runs the model on features.
    """
    rows = [{name: value[row : row + 1] for name, value in features.items()} for row in range(len(next(iter(features.values()))))]
    others = [row for row in rows[1:] if not all(torch.equal(row[name], rows[0][name]) for name in row)]
    if not others:
        return []
    first, *rest = (_inputs(model, layers, row, forward) for row in (rows[0], *others))
    return [name for name in layers if first.get(name) and all(_same(first[name], other.get(name, [])) for other in rest)]


def unused_layers(model: nn.Module, layers: Mapping[str, Layer], features: Mapping[str, Tensor], forward: Forward) -> list[str]:
    """Returns the names of the layers that run, but whose outputs do not reach the logits.

    Args:
        model: The model.
        layers: Its layers by name.
        features: Features of some rows.
        forward: Runs the model on features.
    """
    empty_caches()
    added = {name: torch.zeros((), requires_grad=True) for name in layers}
    ran: set[str] = set()

    def mark(name: str) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            ran.add(name)
            return output + added[name].to(output)

        return hook

    handles = [layer.register_forward_hook(mark(name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            gradients = torch.autograd.grad(forward(model, features).sum(), list(added.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, gradient in zip(added, gradients, strict=True) if gradient is None and name in ran]


@torch.no_grad()
def _inputs(
    model: nn.Module,
    layers: Mapping[str, Layer],
    features: Mapping[str, Tensor],
    forward: Forward,
) -> dict[str, list[Tensor]]:
    """Returns the inputs of every run of every layer."""
    found: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, given: found.setdefault(name, []).append(given[0].clone())

    handles = [layer.register_forward_pre_hook(record(name)) for name, layer in layers.items()]
    try:
        forward(model, features)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
