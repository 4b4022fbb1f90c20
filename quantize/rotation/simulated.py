"""A model as it will be rotated and rounded, with a gradient for its rotations; its weights stay as they are.

    linear layer to quantize    y = Q(x) Q(W')^T + b'      W' = W turned by the rotations (`quantize.rotation.rotation`)
    other linear layers         y = x W'^T + b'            (x R^T) W^T where only its inputs are rotated: W may be a head of V tokens
    embeddings                  rows are turned as they are read
    all other weights           turned before the pass

Inputs are rounded where the rotations reach them: what reads the residual stream, and the output projection of an attention whose values
are rotated. Other inputs, such as those of W_down, stay float: no rotation changes their outliers, whose error would drown all others.

A rotation changes the loss through the steps of rounding, and this is what its gradient is taken of. With the range m of a tensor, row or
group, and steps proportional to m,

    Q(x) = x + m e,   e = (Q(x) - x) / m held       x passes gradients to the layers before (straight-through), m to the rotations

What x itself contributes to the gradient of a rotation is left out. Without rounding it cancels; with it, it says how this very noise would
change when it is turned, and noise of one step size has no direction: its mean is 0, and its variance hides the rest.

m is a maximum, which a step lowers until the next largest value takes its place. So its slope is that of the norm of order `ORDER`, to
which all large values contribute:    dm / m = d log (sum |x|^p)^(1/p).    Ranges are of the batch, and clip nothing; the stage calibrates
them afterwards. Weights and their rounding are computed again in the backward pass, layer by layer, so that memory holds the float model
and one rotated layer.

Tensor names carry their shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foundation.measure.closeness import replaced
from foundation.models.architecture.residual import owner_of
from foundation.models.forward import linears
from foundation.schemes.int4 import grouped as groups_of
from foundation.schemes.int8 import levels, weight_scale
from foundation.schemes.scales import Grid, Scales
from foundation.schemes.table import SCHEMES, Scheme
from quantize.calibration import input_scale
from quantize.group_scales import Groups
from quantize.rotation.rotation import Turn
from quantize.sensitivity import rounded_input

ORDER = 20
"""Order of the norm whose slope a range has; the largest of a million normal values is about sqrt(20) deviations."""
Matrices = Mapping[int, Tensor]
"""The rotations as they are learned, float32 [D, D], by `id` of the rotation that a turn names."""


@dataclass(frozen=True)
class Rounding:
    """How a scheme rounds the weights and inputs of linear layers."""

    scheme: Scheme
    bits: int
    """Bits of an int8 weight."""
    groups: Groups
    """Groups of int4 weights, with float scales; their range is the whole one here."""

    def weight(self, weight_OI: Tensor) -> Tensor:
        """Returns a rounded weight, float32 [O, I], whose gradient is that of its ranges."""
        still_OI = weight_OI.detach()
        moved_OI = self._scales(self._grid(still_OI), torch.ones(())).on_grid(still_OI) - still_OI
        return still_OI + moved_OI * self._growth(weight_OI, grouped=SCHEMES[self.scheme].grouped, symmetric=self.groups.symmetric)

    def input(self, x: Tensor, alike: Tensor) -> Tensor:
        """Returns a rounded input, float32 [..., I].

        Args:
            x: The input; gets the gradient as it is.
            alike: The same values; get the gradient of their ranges.
        """
        row = SCHEMES[self.scheme]
        if row.activations == "float":
            return x
        with torch.no_grad():
            scale = None if row.largest_activation is None else input_scale(float(x.abs().max()), row.largest_activation)
            moved = rounded_input(x, self._scales(Grid(torch.ones(1, 1) if row.grouped else torch.ones(1)), scale)) - x
        if row.activations == "static":
            return x + moved * _relative(alike.flatten())
        return x + moved * self._growth(alike, grouped=row.activations == "blocks", symmetric=True)

    def _grid(self, weight_OI: Tensor) -> Grid:
        row = SCHEMES[self.scheme]
        if row.grouped:
            return self.groups.full(weight_OI)
        return Grid(weight_scale(weight_OI, levels(self.bits) if row.choose_bits else row.largest_weight))

    def _scales(self, grid: Grid, scale: Tensor | None) -> Scales:
        return SCHEMES[self.scheme].scales().chosen(grid, scale, self.bits, self.groups.size, None)

    def _growth(self, values: Tensor, *, grouped: bool, symmetric: bool) -> Tensor:
        """Returns 1, with the slope of the range that each value is rounded in, relative to that range; broadcasts with the values."""
        if not grouped:
            return _relative(values)
        inputs = values.shape[-1]
        values_NGg = groups_of(values.reshape(-1, inputs), self.groups.size)
        if symmetric:
            growth_NG1 = _relative(values_NGg)
        else:
            ends_NG2g = torch.stack([values_NGg.clamp(min=0), values_NGg.clamp(max=0)], dim=2)
            share_NG21 = functional.normalize(ends_NG2g.detach().abs().amax(dim=3, keepdim=True), p=1, dim=2)
            growth_NG1 = 1 + ((_relative(ends_NG2g) - 1) * share_NG21).sum(dim=2)
        return growth_NG1.expand(values_NGg.shape).flatten(1)[:, :inputs].reshape(values.shape)


def _relative(values: Tensor) -> Tensor:
    """Returns 1 with the relative slope of the norm of order `ORDER` over the last axis, which stays with size 1; without one for zeros."""
    largest = values.detach().abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    norm = torch.linalg.vector_norm(values / largest, ORDER, dim=-1, keepdim=True)
    held = norm.detach()
    return torch.where(held > 0, norm / held.clamp(min=torch.finfo(values.dtype).tiny), torch.ones_like(held))


def turned(values: Tensor, turns: Iterable[Turn], matrices: Matrices) -> Tensor:
    """Returns a weight turned by matrices that are being learned: as `Turn.of`, differentiable, in the dtype of the weight."""
    for turn in turns:
        last = values.movedim(turn.axis, -1)
        matrix_DD = matrices[id(turn.rotation)]
        if turn.indices is None:
            last = rotated(last, [matrix_DD])
        else:
            last = last.index_copy(-1, turn.indices, rotated(last[..., turn.indices], [matrix_DD]))
        values = last.movedim(-1, turn.axis)
    return values


def rotated(x: Tensor, matrices: Iterable[Tensor]) -> Tensor:
    """Returns vectors [..., n D], cut into parts of the size of each matrix, [D, D], times the matrices."""
    for matrix_DD in matrices:
        x = (x.reshape(-1, len(matrix_DD)) @ matrix_DD.to(x.dtype)).reshape(x.shape)
    return x


def detached(matrices: Matrices) -> dict[int, Tensor]:
    """Returns matrices that pass no gradient on."""
    return {key: matrix_DD.detach() for key, matrix_DD in matrices.items()}


class TurnedLinear(nn.Module):
    """A linear layer with a turned weight.

    Args:
        layer: The float layer.
        weight_turns: How its weight changes.
        bias_turns: How its bias changes.
        matrices: The rotations.
        rounding: How weight and input are rounded; None for a layer that stays float.
    """

    def __init__(
        self, layer: nn.Linear, weight_turns: tuple[Turn, ...], bias_turns: tuple[Turn, ...], matrices: Matrices, rounding: Rounding | None
    ) -> None:
        super().__init__()
        self.layer, self._weight_turns, self._bias_turns = layer, weight_turns, bias_turns
        self._matrices, self._still, self._rounding = matrices, detached(matrices), rounding
        self.rounds_inputs = rounding is not None and any(turn.axis == 1 for turn in weight_turns)
        self._of_inputs = rounding is None and all(turn.axis == 1 and turn.indices is None for turn in weight_turns)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    @property
    def weight(self) -> Tensor:
        """The float weight, unturned; models read its dtype."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I]."""
        if not torch.is_grad_enabled():
            return self._computed(x)
        y: Tensor = checkpoint(self._computed, x, use_reentrant=False, preserve_rng_state=False)
        return y

    def _computed(self, x: Tensor) -> Tensor:
        weight_OI, bias_O = self.layer.weight.detach(), None if self.layer.bias is None else self.layer.bias.detach()
        if bias_O is not None:
            bias_O = turned(bias_O, self._bias_turns, self._still)
        if self._of_inputs:
            return functional.linear(
                rotated(x, [self._still[id(turn.rotation)].T for turn in reversed(self._weight_turns)]), weight_OI, bias_O
            )
        if self._rounding is None:
            return functional.linear(x, turned(weight_OI, self._weight_turns, self._still), bias_O)
        weight_OI = self._rounding.weight(turned(weight_OI, self._weight_turns, self._matrices))
        if self.rounds_inputs:
            x = self._rounding.input(x, self._alike(x.detach()))
        return functional.linear(x, weight_OI, bias_O)

    def _alike(self, x: Tensor) -> Tensor:
        """Returns an input as it is, but as a function of the rotations: turned back by what they are, and turned by them."""
        keys = [id(turn.rotation) for turn in self._weight_turns if turn.axis == 1]
        return rotated(x, [self._still[key].T @ self._matrices[key] for key in keys])


class TurnedEmbedding(nn.Module):
    """Embeddings whose rows are turned as they are read.

    Args:
        table: The float embeddings.
        turns: How its weight changes, along the channels alone.
        matrices: The rotations.
    """

    def __init__(self, table: nn.Module, turns: tuple[Turn, ...], matrices: Matrices) -> None:
        super().__init__()
        assert all(turn.axis == 1 and turn.indices is None for turn in turns), turns
        self.table, self._matrices = table, [matrices[id(turn.rotation)].detach() for turn in turns]

    @property
    def weight(self) -> Any:
        """The float weight, unturned."""
        return self.table.weight

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """Returns the rows of some ids."""
        return rotated(self.table(*given, **named), self._matrices)


@contextmanager
def simulated(
    model: nn.Module, turns: Mapping[str, tuple[Turn, ...]], matrices: Matrices, roundings: Mapping[str, Rounding]
) -> Iterator[nn.Module]:
    """Makes a model compute as rotated and rounded within the `with` block; yields what is called in its place.

    Args:
        model: The float model.
        turns: How each weight changes, by its name.
        matrices: The rotations.
        roundings: How linear layers are rounded, by path; the others stay float.
    """
    forms: dict[str, nn.Module] = {}
    for name, layer in linears(model).items():
        weight_turns, bias_turns = turns.get(f"{name}.weight", ()), turns.get(f"{name}.bias", ())
        if weight_turns or bias_turns or name in roundings:
            forms[name] = TurnedLinear(layer, weight_turns, bias_turns, matrices, roundings.get(name))
    forms |= {
        name: TurnedEmbedding(module, turns[f"{name}.weight"], matrices)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and f"{name}.weight" in turns
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    others = {name: parameters[name] for name in turns if owner_of(name) not in forms and name in parameters}
    with replaced(model, forms):
        yield _Substituted(model, {name: turned(weight.detach(), turns[name], detached(matrices)) for name, weight in others.items()})


class _Substituted(nn.Module):
    """A model that runs with other weights."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self._weights = model, weights

    def forward(self, **features: Tensor) -> Any:
        """Returns what the model does."""
        return torch.func.functional_call(self.model, dict(self._weights), (), features)
