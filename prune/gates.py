"""Gates: a factor of 1 on everything that may be taken out, one for every row; its gradient says what the loss would do without it.

    y = g_s * a_s        for the part a_s of an activation that belongs to structure s (`prune.places`), g_s = 1
    dL/dg_s = <a_s, dL/da_s> = sum over the weights w that read a_s of w * dL/dw

To first order L(g_s = 0) - L = -dL/dg_s: what Michel et al. 2019 (https://arxiv.org/abs/1905.10650, section 4.1) use for heads, and the sum
of w * dL/dw over a structure of Molchanov et al. 2019 (https://arxiv.org/abs/1906.10771, eq. 8). One forward and one backward of a batch
give the gradients of every gate of every row, since a row has gates of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.structure import Structure
from prune.cost import Component
from prune.places import Places

Where = tuple[int, Component] | str
"""A component of a block, or "hidden"."""


@dataclass
class Gates:
    """The gates of one forward pass."""

    values: dict[Where, Tensor] = field(default_factory=dict)
    """float32 `[b, n]` each, all 1."""

    def open(self, where: Where, rows: int, number: int, device: torch.device) -> Tensor:
        """Returns the gates of a place; those of "hidden" are shared by all norms."""
        if where not in self.values:
            self.values[where] = torch.ones(rows, number, device=device, requires_grad=True)
        return self.values[where]

    def gradients(self, loss_b: Tensor) -> dict[Where, Tensor]:
        """Returns the derivatives of each row's loss by its own gates, float32 `[b, n]`; 0 where the loss does not depend on a gate."""
        names = list(self.values)
        found = torch.autograd.grad(loss_b.sum(), [self.values[name] for name in names], allow_unused=True)
        return {name: torch.zeros_like(self.values[name]) if one is None else one for name, one in zip(names, found, strict=True)}


@contextmanager
def gated(model: nn.Module, structure: Structure, hidden: bool) -> Iterator[Callable[[int], Gates]]:
    """Puts gates on a model for as long as the block lasts; gives a function that opens new ones for a batch of so many rows.

    Args:
        model: In evaluation mode; its weights take no gradient meanwhile.
        structure: Its structure.
        hidden: Whether the channels of the residual stream have gates, too.
    """
    places, sizes, current = Places.of(model, structure), structure.sizes, _Current()
    handles = []
    for block in range(structure.depth):
        reader, group = model.get_submodule(places.heads[block]), structure.attentions[block].group * sizes.head_dim
        handles.append(reader.register_forward_pre_hook(_on_input(current, (block, "heads"), sizes.key_value_heads[block], group)))
        neurons, experts = places.ffn[block], places.experts[block]
        if neurons is not None:
            handles.append(model.get_submodule(neurons).register_forward_pre_hook(_on_input(current, (block, "ffn"), sizes.ffn[block], 1)))
        if experts is not None:
            handles.append(model.get_submodule(experts).register_forward_pre_hook(_on_router(current, block, sizes.experts[block])))
    for norm in places.norms if hidden else ():
        handles.append(model.get_submodule(norm).register_forward_hook(_on_output(current, sizes.hidden)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield current.start
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()


class _Current:
    """The gates of the pass that is running."""

    def __init__(self) -> None:
        self.rows, self.gates = 0, Gates()

    def start(self, rows: int) -> Gates:
        self.rows, self.gates = rows, Gates()
        return self.gates


def _on_input(current: _Current, where: Where, number: int, width: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Gates the input `[b, ..., number * width]` of a layer."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        gates_bn = current.gates.open(where, current.rows, number, x.device).repeat_interleave(width, dim=1)
        return (_over_rows(x, gates_bn), *args[1:])

    return hook


def _on_output(current: _Current, number: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return _over_rows(output, current.gates.open("hidden", current.rows, number, output.device))

    return hook


def _on_router(current: _Current, block: int, number: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Gates the weights that the router gives: tokens `[b * L]`, one row after the other."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, chosen_Nk, weights_Nk, *rest = args
        gates_bE = current.gates.open((block, "experts"), current.rows, number, states.device)
        gates_NE = gates_bE.repeat_interleave(len(states) // current.rows, dim=0)
        return (states, chosen_Nk, weights_Nk * gates_NE.gather(1, chosen_Nk), *rest)

    return hook


def _over_rows(x: Tensor, gates_bn: Tensor) -> Tensor:
    """Returns `x` `[b, ..., n]` times the gates `[b, n]`, the same for all tokens of a row."""
    return x * gates_bn.reshape(len(gates_bn), *[1] * (x.dim() - 2), -1)
