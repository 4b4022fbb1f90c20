"""Gates: a factor of 1 on every prunable unit, one per row; its gradient estimates how the loss changes without the unit.

    y = g_s * a_s        for the activation a_s of unit s (`prune.hook_points`), g_s = 1
    dL/dg_s = <a_s, dL/da_s> = sum over the weights w that read a_s of w * dL/dw

To first order, L(g_s = 0) - L = -dL/dg_s. Michel et al. 2019 (https://arxiv.org/abs/1905.10650, section 4.1) use it for heads; it is the
sum of w * dL/dw over a unit in Molchanov et al. 2019 (https://arxiv.org/abs/1906.10771, eq. 8). Since each row has its own gates, one
forward and backward pass of a batch gives the gradients for every gate and row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import Structure
from foundation.models.layers.listed_experts import is_listed, scaled
from prune.cost import GATED, Component, count_of, width_of
from prune.hook_points import HookPoints

GateSite = tuple[int, Component] | str
"""The place of a gate: (block, component), or "hidden"."""


@dataclass
class Gates:
    """The gates of one forward pass."""

    values: dict[GateSite, Tensor] = field(default_factory=dict)
    """Gates by site, float32 `[b, n]`, all 1."""

    def open(self, where: GateSite, rows: int, number: int, device: torch.device) -> Tensor:
        """Returns the gates of a site, created on first use; all norms share the gates of "hidden"."""
        if where not in self.values:
            self.values[where] = torch.ones(rows, number, device=device, requires_grad=True)
        return self.values[where]

    def gradients(self, loss_b: Tensor) -> dict[GateSite, Tensor]:
        """Returns the derivative of each row's loss by its gates, float32 `[b, n]`; 0 for gates that the loss does not depend on."""
        names = list(self.values)
        found = torch.autograd.grad(loss_b.sum(), [self.values[name] for name in names], allow_unused=True)
        return {name: torch.zeros_like(self.values[name]) if one is None else one for name, one in zip(names, found, strict=True)}


@contextmanager
def gated(model: nn.Module, structure: Structure, hidden: bool) -> Iterator[Callable[[int], Gates]]:
    """Attaches gates to a model inside the `with` block; yields a function that creates the gates for a batch of the given size.

    Args:
        model: In evaluation mode; its weights take no gradients meanwhile.
        structure: Its structure.
        hidden: Whether the channels of the residual stream have gates, too.
    """
    hooks, sizes, current = HookPoints.of(model, structure), structure.sizes, _Current()
    handles = []
    for block in range(structure.depth):
        for what in GATED:
            reader, number = hooks.at(block, what), count_of(sizes, block, what)
            if reader is not None:
                hook = _on_input(current, (block, what), number, width_of(structure, block, what))
                handles.append(model.get_submodule(reader).register_forward_pre_hook(hook))
        experts = hooks.experts[block]
        if experts is not None:
            handles.append(model.get_submodule(experts).register_forward_pre_hook(_on_router(current, block, sizes.experts[block])))
    for norm in hooks.norms if hidden else ():
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
    """The gates of the current forward pass."""

    def __init__(self) -> None:
        self.rows, self.gates = 0, Gates()

    def start(self, rows: int) -> Gates:
        self.rows, self.gates = rows, Gates()
        return self.gates


def _on_input(current: _Current, where: GateSite, number: int, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Returns a hook that gates the input `[b, ..., number * width]` of a layer."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        gates_bn = current.gates.open(where, current.rows, number, x.device).repeat_interleave(width, dim=1)
        return (_over_rows(x, gates_bn), *args[1:])

    return hook


def _on_output(current: _Current, number: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return _over_rows(output, current.gates.open("hidden", current.rows, number, output.device))

    return hook


def _on_router(current: _Current, block: int, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Returns a hook that gates the routing weights of tokens `[b * L]`, ordered row by row."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, chosen_Nk, weights_Nk, *rest = args
        gates_bE = current.gates.open((block, "experts"), current.rows, number, states.device)
        gates_NE = gates_bE.repeat_interleave(len(states) // current.rows, dim=0)
        if is_listed(module):
            return (states, chosen_Nk, scaled(module, chosen_Nk, weights_Nk, gates_NE), *rest)
        return (states, chosen_Nk, weights_Nk * gates_NE.gather(1, chosen_Nk), *rest)

    return hook


def _over_rows(x: Tensor, gates_bn: Tensor) -> Tensor:
    """Returns `x` `[b, ..., n]` times the gates `[b, n]`, the same for all tokens of a row."""
    return x * gates_bn.reshape(len(gates_bn), *[1] * (x.dim() - 2), -1)
