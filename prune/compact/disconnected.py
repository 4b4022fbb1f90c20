"""Disconnected units: heads and FFN neurons whose removal does not change the outputs, because zeros cut them off.

    unread     every weight that reads the unit is 0                      its value does not matter
    constant   every weight that writes the unit is 0: its value c is     W c is added to the bias of the layer that reads it
               the same for all tokens of all rows

A neuron is written by its row of W_up; behind a gate, act(g) * u, by two rows, and one of them without weights and bias is enough if the
product is then 0.
A head is written by its rows of W_v, as the rows of a softmax sum to 1; with grouped-query attention by the rows of its key-value head.
Constants are read off the running model, so activations, biases and gates need no table: a unit whose value varies there stays.

Afterwards the weights that read a disconnected unit are 0, and `prune.surgery` removes it exactly. One unit of a kind stays in each block,
also where all are disconnected: shapes of Transformers have no block without heads or neurons.

Not supported: heads where the layers share one table with an entry for each head (T5); experts; channels of the residual stream, which
every norm reads; single channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import HEAD_KINDS, Structure, head_pieces, is_interleaved
from foundation.models.forward import forward
from prune.cost import Component, count_of
from prune.hook_points import HookPoints
from prune.surgery import KeptUnits

Reason = Literal["unread", "constant"]
REASONS: tuple[Reason, ...] = ("unread", "constant")
VARIES = 1e-6
"""Largest distance between two values of a constant, relative to its magnitude where that is above 1: the rounding of a softmax's sum."""


@dataclass(frozen=True)
class Disconnected:
    """Disconnected units of a model, by block and component: bool `[S]` each."""

    unread: Mapping[tuple[int, Component], Tensor] = field(default_factory=dict)
    """Units that nothing reads."""
    constant: Mapping[tuple[int, Component], Tensor] = field(default_factory=dict)
    """Units with a reader, whose value is the same for all tokens."""

    def count(self, reason: Reason, what: Component) -> int:
        """Returns the number of units of a component over all blocks."""
        found = self.unread if reason == "unread" else self.constant
        return sum(int(gone_S.sum()) for (_, component), gone_S in found.items() if component == what)

    def kept(self, structure: Structure) -> KeptUnits:
        """Returns the units that stay: at least one of each component of a block."""
        everything = KeptUnits.everything(structure.sizes)

        def left(what: Component) -> list[Sequence[int]]:
            return [self._left(block, what, len(everything.units(block, what))) for block in range(structure.depth)]

        cross = left("cross") if everything.cross else ()
        return replace(everything, heads=left("heads"), ffn=left("ffn"), cross=cross)

    def _left(self, block: int, what: Component, number: int) -> Sequence[int]:
        if (block, what) not in self.unread:
            return range(number)
        gone_S = self.unread[block, what] | self.constant[block, what]
        return (~gone_S).nonzero().flatten().tolist() or [0]


def disconnect(model: nn.Module, structure: Structure, features: Mapping[str, Tensor]) -> Disconnected:
    """Finds disconnected units, folds their constants into biases and zeroes the weights that read them, in place.

    Args:
        model: A float model in evaluation mode, with `nn.Linear` in place of `Conv1D`.
        structure: Its structure.
        features: Some rows, on which constants are read off.
    """
    points = _points(model, structure)
    unread = {point: _unread(model.get_submodule(name), structure, point) for point, name in points.items()}
    candidates = {point: _unwritten(model, structure, point) & ~unread[point] for point in points}
    values = _values(model, {point: points[point] for point, found in candidates.items() if bool(found.any())}, features)
    constant = {}
    with torch.no_grad():
        for point, name in points.items():
            reader = model.get_submodule(name)
            assert isinstance(reader, nn.Linear), f"{name} is {type(reader).__name__}"
            constant[point] = torch.zeros_like(unread[point])
            if point in values:
                constant[point] = _folded(reader, candidates[point], *values[point])
            gone_I = _spread(unread[point] | constant[point], reader.in_features)
            reader.weight[:, gone_I] = 0
    return Disconnected(unread, constant)


def _points(model: nn.Module, structure: Structure) -> dict[tuple[int, Component], str]:
    """Returns the layer that reads each component whose units can be removed."""
    hooks, kinds = HookPoints.of(model, structure), () if structure.tables else HEAD_KINDS
    components: tuple[Component, ...] = (*kinds, "ffn")
    found = {(block, what): hooks.at(block, what) for block in range(structure.depth) for what in components}
    return {point: name for point, name in found.items() if name is not None}


def _unread(reader: nn.Module, structure: Structure, point: tuple[int, Component]) -> Tensor:
    weight_OI: Tensor = reader.weight  # type: ignore[assignment]
    read_I = (weight_OI.detach() != 0).any(dim=0)
    return ~read_I.reshape(count_of(structure.sizes, *point), -1).any(dim=1)


def _unwritten(model: nn.Module, structure: Structure, point: tuple[int, Component]) -> Tensor:
    """Returns the units that may be constant, bool `[S]`: all of their writers are all zero, or one of them writes nothing but 0.

    A writer that has zeros and a bias is not enough where there are two: `act(g) * b` with a ReLU may be 0 on some rows alone.
    """
    number = count_of(structure.sizes, *point)
    writers = _writers(model, structure, point)
    silent = torch.zeros(number, dtype=torch.bool)
    empty = torch.full((number,), bool(writers))
    for rows, bias in writers:
        no_rows = ~rows.reshape(number, -1).any(dim=1)
        empty &= no_rows
        silent |= no_rows & ~bias.reshape(number, -1).any(dim=1)
    return empty | silent


def _writers(model: nn.Module, structure: Structure, point: tuple[int, Component]) -> list[tuple[Tensor, Tensor]]:
    """Returns for each matrix that writes the units which of its rows have a weight, and which a bias, bool `[S * width]` each."""
    weights, (block, what) = dict(model.named_parameters()), point

    def pieces(name: str, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
        rows = (weights[name].detach() != 0).any(dim=1)
        bias = weights.get(f"{name.removesuffix('weight')}bias")
        biased = torch.zeros_like(rows) if bias is None else bias.detach() != 0
        return list(zip(torch.split(rows, lengths), torch.split(biased, lengths), strict=True))

    if what == "ffn":
        found = []
        for name, axis in sorted(structure.ffn[block]):
            if weights[name].ndim == 2 and axis == 0:
                times = structure.repeated.get((name, axis), 1)
                found += pieces(name, [len(weights[name]) // times] * times)
        return found
    heads = structure.of_heads(block, "cross" if what == "cross" else "heads")
    assert heads is not None, f"block {block} has no {what}"
    attention, axes = heads
    matrices = {name: parts for (name, axis), parts in axes.items() if weights[name].ndim == 2 and axis == 0}
    return [
        piece
        for name, parts in sorted(matrices.items())
        if not is_interleaved(attention, parts)
        for piece, (part, _) in zip(pieces(name, head_pieces(attention, parts)), parts, strict=True)
        if part == "value"
    ]


def _values(
    model: nn.Module, points: Mapping[tuple[int, Component], str], features: Mapping[str, Tensor]
) -> dict[tuple[int, Component], tuple[Tensor, Tensor]]:
    """Returns the lowest and the highest value of each input of some layers over all tokens, float32 `[I]` each."""
    found: dict[tuple[int, Component], tuple[Tensor, Tensor]] = {}

    def read(point: tuple[int, Component], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x_NI = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        low, high = x_NI.amin(dim=0), x_NI.amax(dim=0)
        if point in found:  # a module that runs more than once
            low, high = torch.minimum(low, found[point][0]), torch.maximum(high, found[point][1])
        found[point] = low, high

    with ExitStack() as stack, torch.no_grad():
        for point, name in points.items():
            stack.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(read, point)))
        if points:
            forward(model, features)
    return found


def _folded(reader: nn.Linear, candidates_S: Tensor, low_I: Tensor, high_I: Tensor) -> Tensor:
    """Adds the constants among the candidates to the bias of the layer that reads them, in place; returns them, bool `[S]`."""
    still_I = (high_I - low_I) <= VARIES * torch.maximum(low_I.abs(), high_I.abs()).clamp(min=1)
    still_S = candidates_S & still_I.reshape(len(candidates_S), -1).all(dim=1)
    mean_I = (low_I + high_I) / 2
    if reader.bias is None:
        return still_S & (mean_I == 0).reshape(len(candidates_S), -1).all(dim=1)
    gone_I = _spread(still_S, reader.in_features)
    reader.bias.add_((reader.weight[:, gone_I].double() @ mean_I[gone_I].double()).to(reader.bias.dtype))
    return still_S


def _spread(units_S: Tensor, length: int) -> Tensor:
    """Repeats a value per unit for each of its elements."""
    return units_S.repeat_interleave(length // len(units_S))
