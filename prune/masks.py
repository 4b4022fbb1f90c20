"""Masks: gates on a model that are the same for every row, for as long as they are learned, and then go into the weights.

    heads, ffn   a factor on what the layer that reads them gets (`prune.places`)
    hidden       a factor on the outputs of all norms over the residual stream
    layers       y = x + g (block(x) - x): 0 takes the block out, as surgery does

Gates of heads and neurons go into the columns of the layer that reads them, those of channels into the weights and biases of the norms,
both exactly, but that a closed one leaves a millionth: a unit that stays nevertheless can be learned again, also where zeros are held. Left
out: those of blocks, which no weight can hold; they have to be 0 or 1 by then. `prune.gates` has gates of every row, whose gradients are
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.models.blocks import states_given, states_of
from compress.models.structure import Structure
from prune.gates import Where
from prune.places import Places

CLOSED = 1e-6
Gate = Callable[[bool], Tensor]
"""Gives the factors of a place, float `[n]`; is told whether the model is in training."""


@contextmanager
def masked(model: nn.Module, structure: Structure, gates: Mapping[Where | tuple[int, str], Gate]) -> Iterator[None]:
    """Puts gates on a model for as long as the block lasts.

    Args:
        model: The model.
        structure: Its structure.
        gates: By place: (block, "heads"), one for a group; (block, "ffn"); (block, "layer"), `[1]`; "hidden". Absent: 1.
    """
    places, sizes = Places.of(model, structure), structure.sizes
    handles = []
    for block in range(structure.depth):
        group = structure.attentions[block].group * sizes.head_dim
        for where, reader, width in (((block, "heads"), places.heads[block], group), ((block, "ffn"), places.ffn[block], 1)):
            if where in gates:
                handles.append(model.get_submodule(str(reader)).register_forward_pre_hook(_on_input(gates[where], width)))
        if (block, "layer") in gates:
            module = model.get_submodule(places.blocks[block])
            handles.append(module.register_forward_hook(_on_block(gates[block, "layer"]), with_kwargs=True))
    for norm in places.norms if "hidden" in gates else ():
        handles.append(model.get_submodule(norm).register_forward_hook(_on_output(gates["hidden"])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fold(model: nn.Module, structure: Structure, gates: Mapping[Where | tuple[int, str], Gate]) -> None:
    """Multiplies layers and norms by their gates, in place: the model answers as it did with those of heads, neurons and channels."""
    places, sizes = Places.of(model, structure), structure.sizes
    with torch.no_grad():
        for block in range(structure.depth):
            group = structure.attentions[block].group * sizes.head_dim
            for where, reader, width in (((block, "heads"), places.heads[block], group), ((block, "ffn"), places.ffn[block], 1)):
                if where in gates:
                    layer: Any = model.get_submodule(str(reader))
                    layer.weight.mul_(_last(gates[where], layer.weight).repeat_interleave(width))
        for name in places.norms if "hidden" in gates else ():
            norm: Any = model.get_submodule(name)
            gates_D = _last(gates["hidden"], norm.weight)
            offset = _offset(norm)
            norm.weight.copy_((norm.weight + offset) * gates_D - offset)
            if getattr(norm, "bias", None) is not None:
                norm.bias.mul_(gates_D)


def _last(gate: Gate, weight: Tensor) -> Tensor:
    """Returns what a weight is multiplied by in the end."""
    return gate(False).detach().to(weight).clamp(min=CLOSED)


def _offset(norm: nn.Module) -> float:
    """Returns what a norm adds to its weight before it multiplies by it: 1 with Gemma, whose norms are x (1 + w), else 0."""
    nothing = {name: torch.zeros_like(value) for name, value in norm.named_parameters()}
    answer: Tensor = functional_call(norm, nothing, (torch.eye(2, len(nothing["weight"])).to(nothing["weight"]),))
    return float(bool(answer.any()))


def _on_input(gate: Gate, width: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Gates the input `[..., n * width]` of a layer."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * gate(module.training).repeat_interleave(width), *args[1:])

    return hook


def _on_output(gate: Gate) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, args, output: output * gate(module.training)


def _on_block(gate: Gate) -> Callable[[nn.Module, Any, Mapping[str, Any], Any], Any]:
    def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        given = states_given(args, kwargs)
        made = states_of(output)
        changed = given + gate(module.training) * (made - given)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook
