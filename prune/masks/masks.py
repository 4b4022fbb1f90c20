"""Masks: gates shared by all rows, attached to a model while they are learned and folded into its weights afterwards.

    heads, ffn   scale the input of the layer that reads them (`prune.hook_points`)
    hidden       scales the outputs of all norms over the residual stream
    layers       y = x + g (block(x) - x): g = 0 skips the block, like surgery

Gates of heads and neurons are folded into the columns of the layer that reads them, gates of channels into the weights and biases of the
norms. Both are exact, except that a closed gate leaves a factor of 1e-6: a closed unit that selection keeps can then be learned again, even
if zeros are held. Not supported: folding gates of blocks, which no weight can absorb; they must be 0 or 1 by then. For gates per row,
whose gradients are importance scores, see `prune.gates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from foundation.models.architecture.blocks import Arguments, Keywords, Output, hidden_states_of, states_of
from foundation.models.architecture.structure import Structure
from prune.cost import GATED, width_of
from prune.gates import GateSite
from prune.hook_points import HookPoints

CLOSED = 1e-6
Gate = Callable[[bool], Tensor]
"""Returns the gates of one site, float `[n]`; its argument says whether the model is in training mode."""


@contextmanager
def masked(
    model: nn.Module,
    structure: Structure,
    gates: Mapping[GateSite | tuple[int, str], Gate],
    own: Callable[[Tensor], Tensor] = lambda gates_n: gates_n,
) -> Iterator[None]:
    """Attaches gates to a model inside the `with` block, where it may be divided among processes and put together again.

    Args:
        model: The whole model.
        structure: Its structure.
        gates: Gates by site: (block, "heads") and (block, "cross"), one per head group; (block, "ffn"); (block, "layer"), `[1]`; "hidden".
            Others count as 1.
        own: Takes the gates of a component, `[n]`; returns the gates of the heads or neurons that this process has in a pass.
    """
    hooks = HookPoints.of(model, structure)
    handles: list[tuple[str, RemovableHandle]] = []
    for block in range(structure.depth):
        for what in GATED:
            if (block, what) in gates:
                hook, reader = _on_input(gates[block, what], width_of(structure, block, what), own), str(hooks.at(block, what))
                handles.append((reader, model.get_submodule(reader).register_forward_pre_hook(hook)))
        if (block, "layer") in gates:
            name = hooks.blocks[block]
            layer_hook = _on_block(gates[block, "layer"])
            handles.append((name, model.get_submodule(name).register_forward_hook(layer_hook, with_kwargs=True)))
    for norm in hooks.norms if "hidden" in gates else ():
        handles.append((norm, model.get_submodule(norm).register_forward_hook(_on_output(gates["hidden"]))))
    try:
        yield
    finally:
        for name, handle in handles:
            handle.remove()
            _forget(model.get_submodule(name), handle.id)


def _forget(module: nn.Module, hook: int) -> None:
    """Removes a hook from a module that was copied with it: a model that was divided is put together from copies of its modules."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_with_kwargs):
        hooks.pop(hook, None)


def fold(model: nn.Module, structure: Structure, gates: Mapping[GateSite | tuple[int, str], Gate]) -> None:
    """Folds the gates of heads, neurons and channels into layers and norms, in place; the outputs stay as with the gates attached."""
    hooks = HookPoints.of(model, structure)
    with torch.no_grad():
        for block in range(structure.depth):
            for what in GATED:
                if (block, what) in gates:
                    layer: Any = model.get_submodule(str(hooks.at(block, what)))
                    layer.weight.mul_(_last(gates[block, what], layer.weight).repeat_interleave(width_of(structure, block, what)))
        for name in hooks.norms if "hidden" in gates else ():
            norm: Any = model.get_submodule(name)
            gates_D = _last(gates["hidden"], norm.weight)
            offset = _offset(norm)
            norm.weight.copy_((norm.weight + offset) * gates_D - offset)
            if getattr(norm, "bias", None) is not None:
                norm.bias.mul_(gates_D)


def _last(gate: Gate, weight: Tensor) -> Tensor:
    """Returns the final factor of a weight: the gate in evaluation mode, at least `CLOSED`."""
    return gate(False).detach().to(weight).clamp(min=CLOSED)


def _offset(norm: nn.Module) -> float:
    """Returns the offset of a norm's weight: 1 for Gemma, whose norms compute x (1 + w), else 0."""
    nothing = {name: torch.zeros_like(value) for name, value in norm.named_parameters()}
    answer: Tensor = functional_call(norm, nothing, (torch.eye(2, len(nothing["weight"])).to(nothing["weight"]),))
    return float(bool(answer.any()))


def _on_input(gate: Gate, width: int, own: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Returns a hook that gates the input `[..., n * width]` of a layer, or of the part of it that this process has."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * own(gate(module.training)).repeat_interleave(width), *args[1:])

    return hook


def _on_output(gate: Gate) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda module, args, output: output * gate(module.training)


def _on_block(gate: Gate) -> Callable[[nn.Module, Arguments, Keywords, Output], Output]:
    def hook(module: nn.Module, args: Arguments, kwargs: Keywords, output: Output) -> Output:
        given = hidden_states_of(args, kwargs)
        made = states_of(output)
        changed = given + gate(module.training) * (made - given)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook
