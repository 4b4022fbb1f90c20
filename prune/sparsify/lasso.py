"""Reweighted group lasso: a penalty shrinks whole groups of weights to zero during training; afterwards these groups are pruned
(Li et al. 2020, https://arxiv.org/abs/2009.08065, section 3; reweighting: Candes et al. 2008).

    minimize  loss + sum over layers l of  lambda_l * sum over groups g of  beta_g ||V_g||_2,     beta_g = 1 / (||V_g||_2 + 0.001)

A matrix is divided into blocks of R outputs and C inputs, smaller at the edges. A group is a row of a block (C weights of one output), or a
column of a block (R weights of one input), or both kinds are groups. beta is updated at the first step and then at equal intervals: a group
that has become small is penalized harder from then on.

The published form is V = W (`metric: weights`). By default V is W in the metric of the loss, V_oi = g_o W_oi a_i
(`prune.sparsify.curvature`, measured whenever beta is): a group is then small if the answers hardly depend on it, and the groups of all
layers can be compared.

The penalty acts as its proximal step after each step of the optimizer, of learning rate eta_t (Parikh and Boyd 2014, section 6.5.1):

    W_g <- W_g * max(0, 1 - eta_t lambda_l beta_g / ||V_g||_2)

It is not added to the loss: AdamW divides a gradient by its usual size, so that the penalty would move every group by the same small
distance, and none to zero. With `strength: auto`, lambda is what takes the target share s of the groups to zero in the steps that are left,
if only the penalty moved them; it is found anew at every step, and so rises while the loss holds groups in place:

    lambda = quantile_s over groups of (||V_g||_2 / beta_g)  /  sum of eta over the steps left of the first 90 %

Afterwards the smallest groups are zeroed:

    layer      the groups of each layer with the smallest root mean squares, until the target sparsity is reached in every layer
    balanced   the same share of rows, or columns, in every block, as nearly as possible, but never all of them
    model      the same over all layers together, until the target sparsity is reached over the model: the sparsity of a layer follows from
               its groups; no layer loses all of them

The quantile of lambda is taken over a layer, or with `model` over all layers. The root mean square does not favour the smaller groups at
the edges. Surgery can remove a row or column that is zero in all of its blocks; nothing is done to avoid such rows. Not supported: a
penalty on embeddings.

Tensor names carry their shapes: O outputs, I inputs, S x T blocks of R x C.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.machine.parallel import ALONE, Team
from foundation.training.schedule import steps_in
from foundation.training.train import Batch, Objective
from prune.choices import Groups
from prune.sparsify.curvature import Curvature, in_metric, metrics
from prune.sparsify.patterns import Blocks, block_sizes, highest, highest_blocks, num_zeros, spread

EPSILON = 1e-3
PENALIZED = 0.9
"""Share of the steps in which `auto` drives the groups to zero; in the remaining steps the other weights recover."""
SMALLEST = 1e-30
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def pieces(blocks: Blocks, groups: Groups) -> tuple[Blocks, ...]:
    """Returns the shapes of the groups: a row of a block has one output, a column one input."""
    both = {"rows": Blocks(1, blocks.columns), "columns": Blocks(blocks.rows, 1)}
    return tuple(shape for name, shape in both.items() if groups in (name, "both"))


def group_norms(weight_OI: Tensor, piece: Blocks) -> Tensor:
    """Returns the L2 norm of each group, float32 `[S, T]`, for groups shaped like `piece`; its gradient at 0 is 0."""
    outputs, inputs = weight_OI.shape
    padded = functional.pad(weight_OI, (0, -inputs % piece.columns, 0, -outputs % piece.rows))
    strips, columns = padded.shape[0] // piece.rows, padded.shape[1] // piece.columns
    norms: Tensor = torch.linalg.vector_norm(padded.reshape(strips, piece.rows, columns, piece.columns), dim=(1, 3))
    return norms


class Grouping(Protocol):
    """Groups of weights that the penalty shrinks."""

    @property
    def layer(self) -> str:
        """Name of the layer whose strength counts."""

    def norms(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the L2 norm of each group, float32 of any shape, given the weights by layer in the metric."""

    def scale(self, layers: Mapping[str, nn.Linear], factor: Tensor) -> None:
        """Multiplies the weights of each group by a factor, in place."""


@dataclass(frozen=True)
class BlockGroups:
    """The groups of one shape in one layer."""

    layer: str
    shape: Blocks

    def norms(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the L2 norm of each group, float32 `[S, T]`."""
        return group_norms(weights[self.layer], self.shape)

    def scale(self, layers: Mapping[str, nn.Linear], factor: Tensor) -> None:
        """Multiplies the weights of each group by its entry in `factor`, `[S, T]`."""
        weight_OI = layers[self.layer].weight
        weight_OI.mul_(spread(factor, weight_OI.shape, self.shape))


@dataclass(frozen=True)
class Penalty:
    """The settings of the penalty."""

    strengths: Mapping[str, float | None]
    """lambda by layer; None: found at every step."""
    shapes: Sequence[Blocks]
    """Shapes of the groups."""
    reweight: float
    """Share of the steps between two updates of beta."""
    target: float
    """Share of the weights to take to zero."""
    together: bool
    """Whether all layers share the quantile of lambda."""
    rate: Callable[[int, int], float]
    """Learning rate of a step, from the step and the number of steps."""
    measure: Callable[[nn.Module], Mapping[str, Curvature]] | None = None
    """Measures the curvature of the layers; None: the metric of the weights."""
    bundles: Sequence[Grouping] = ()
    """Groups across layers, in place of `shapes`."""


class Lasso(nn.Module):
    """The objective of training with the penalty; it moves the weights itself, before the first micro-batch of each step.

    Args:
        objective: The objective of the task.
        layers: Layers with the penalty, by module name.
        penalty: The settings of the penalty.
        model: The model of these layers.
        team: The processes that train it together; the first one measures for all of them.
    """

    def __init__(
        self, objective: Objective, layers: Mapping[str, nn.Linear], penalty: Penalty, model: nn.Module, team: Team = ALONE
    ) -> None:
        super().__init__()
        self.objective, self.penalty, self.team, self.step = objective, penalty, team, 0
        self.layers = tuple(layers.items())  # in a tuple, so that the layers are not submodules
        within = [
            (BlockGroups(name, shape), f"beta_{number}_{which}")
            for number, name in enumerate(layers)
            for which, shape in enumerate(penalty.shapes)
        ]
        across = [(bundle, f"beta_{number}_0") for number, bundle in enumerate(penalty.bundles)]
        self.terms: Sequence[tuple[Grouping, str]] = across or within
        for name, value in self._measured(model).items():  # buffers, so that a resumed training continues with the same values
            self.register_buffer(name, value)

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the parts of the loss of the task, float32 `[b]` each."""
        if batch.step != self.step:
            self.step = batch.step
            self.shrink(model, batch.step, batch.num_steps)
        return self.objective(model, batch)

    @torch.no_grad()
    def shrink(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Takes the proximal step that follows the optimizer's step `step - 1`."""
        if step % max(1, steps_in(self.penalty.reweight, num_steps)) == 0:
            for name, value in self._measured(model).items():
                setattr(self, name, value)
        values = {name: self._in_metric(number) for number, (name, _) in enumerate(self.layers)}
        norms = [grouping.norms(values) for grouping, _ in self.terms]
        betas: list[Tensor] = [getattr(self, name) for _, name in self.terms]
        lambdas = self.lambdas(norms, betas, step, num_steps)
        eta = self.penalty.rate(step - 1, num_steps)
        for (grouping, _), norm, beta_now, strength in zip(self.terms, norms, betas, lambdas, strict=True):
            factor = 1 - eta * strength * beta_now / norm.clamp(min=SMALLEST)
            grouping.scale(dict(self.layers), factor.clamp(min=0))

    def _measured(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the factors of the metric and beta, as they are now, by name of their buffer."""
        device = self.layers[0][1].weight.device
        found = {name: value.cpu() for name, value in self._measured_here(model).items()} if self.team.is_first else {}
        return {name: value.to(device) for name, value in self.team.broadcast_object(found).items()}

    def _measured_here(self, model: nn.Module) -> dict[str, Tensor]:
        weights = {name: layer.weight.detach() for name, layer in self.layers}
        found: dict[str, Tensor] = {}
        if self.penalty.measure is not None:
            factors = metrics(weights, self.penalty.measure(model))
            for number, (name, _) in enumerate(self.layers):
                found |= {f"outputs_{number}": factors[name].outputs_O, f"inputs_{number}": factors[name].inputs_I}
                weights[name] = in_metric(weights[name], factors[name])
        return found | {name: beta(grouping.norms(weights)) for grouping, name in self.terms}

    def _in_metric(self, number: int) -> Tensor:
        """Returns the weights of a layer in the metric, float32 `[O, I]`."""
        weight_OI = self.layers[number][1].weight.detach()
        if self.penalty.measure is None:
            return weight_OI
        return in_metric(weight_OI, Curvature(getattr(self, f"outputs_{number}"), getattr(self, f"inputs_{number}")))

    def lambdas(self, norms: Sequence[Tensor], betas: Sequence[Tensor], step: int, num_steps: int) -> list[float]:
        """Returns lambda for each layer and kind of group; 0 where it is found at every step and no step is left."""
        penalty = self.penalty
        left = sum(penalty.rate(later, num_steps) for later in range(step, steps_in(PENALIZED, num_steps)))
        kinds = 1 if penalty.bundles else len(penalty.shapes)
        share = 1 - (1 - penalty.target) ** (1 / kinds)  # a weight of a row and a column goes with either
        needed = [(norm_ST / beta_ST).flatten() for norm_ST, beta_ST in zip(norms, betas, strict=True)]
        found = [quantile(torch.cat(needed), share)] * len(needed) if penalty.together else [quantile(one, share) for one in needed]
        automatic = [value / left if left else 0.0 for value in found]
        given = [penalty.strengths[grouping.layer] for grouping, _ in self.terms]
        return [auto if fixed is None else fixed for auto, fixed in zip(automatic, given, strict=True)]


def quantile(values: Tensor, share: float) -> float:
    """Returns the smallest value with at least `share` of the values at or below it."""
    return float(values.kthvalue(max(1, math.ceil(share * values.numel() - 1e-9))).values)


def beta(norms: Tensor) -> Tensor:
    """Returns the penalty weights of groups with these norms."""
    return 1 / (norms + EPSILON)


def strengths(names: Sequence[str], usual: float | None, others: Mapping[str, float]) -> dict[str, float | None]:
    """Returns lambda by layer: the value of the last name pattern that matches, else `usual`."""
    found: dict[str, float | None] = dict.fromkeys(names, usual)
    for pattern, value in others.items():
        found |= dict.fromkeys(fnmatch.filter(names, pattern), value)
    return found


def root_mean_squares(weight_OI: Tensor, piece: Blocks) -> Tensor:
    """Returns the root mean square of each group, float64 `[S, T]`."""
    sizes_ST = block_sizes(weight_OI.shape, piece).to(weight_OI.device)
    return group_norms(weight_OI.detach().double(), piece) / sizes_ST.double().sqrt()


def layer_mask(weight_OI: Tensor, shapes: Sequence[Blocks], sparsity: float) -> Tensor:
    """Returns which weights stay when the smallest groups of a layer are zeroed, bool `[O, I]`; ties keep the first.

    Args:
        weight_OI: float32.
        shapes: Shapes of the groups; two kinds are ranked together, and a weight is zeroed with either of its groups.
        sparsity: Share of the weights to zero; the nearest reachable one, for two kinds the nearest in the order of their ranking.
    """
    sizes = [root_mean_squares(weight_OI, shape) for shape in shapes]
    if len(shapes) == 1:
        stays_ST = highest_blocks(sizes[0].square(), weight_OI.shape, shapes[0], num_zeros(sparsity, weight_OI.numel()))
        return spread(stays_ST, weight_OI.shape, shapes[0])
    order = torch.cat([values.flatten() for values in sizes]).argsort(descending=True, stable=True).flip(0)

    def mask_without(gone: int) -> Tensor:
        stays = torch.ones(len(order), dtype=torch.bool, device=order.device)
        stays[order[:gone]] = False
        parts = torch.split(stays, [values.numel() for values in sizes])
        spreads = [
            spread(part.reshape(values.shape), weight_OI.shape, shape) for part, values, shape in zip(parts, sizes, shapes, strict=True)
        ]
        return torch.stack(spreads).all(dim=0)

    def missed(gone: int) -> int:
        return int((~mask_without(gone)).sum()) - target

    low, high, target = 0, len(order), num_zeros(sparsity, weight_OI.numel())
    while low < high:  # zeros overlap where a row and a column cross, so their number has to be searched for
        middle = (low + high) // 2
        low, high = (low, middle) if missed(middle) >= 0 else (middle + 1, high)
    one_less = low > 0 and (not bool(mask_without(low).any()) or -missed(low - 1) < missed(low))  # nearer, or needed to keep any weight
    return mask_without(low - 1 if one_less else low)


def model_masks(weights: Mapping[str, Tensor], shapes: Sequence[Blocks], sparsity: float) -> dict[str, Tensor]:
    """Returns which weights stay when the smallest groups of all layers are zeroed, bool `[O, I]` by layer.

    Args:
        weights: Weights by layer, float32 `[O, I]`.
        shapes: Shapes of the groups; a weight is zeroed with any of its groups.
        sparsity: Share of all weights to zero; reached from below as nearly as whole groups allow, and never by all groups of a layer.
    """
    sizes = {name: [root_mean_squares(weight_OI, shape) for shape in shapes] for name, weight_OI in weights.items()}
    spreads = {
        name: torch.stack([spread(size_ST, weight_OI.shape, shape) for size_ST, shape in zip(sizes[name], shapes, strict=True)])
        for name, weight_OI in weights.items()
    }
    least = {name: values.amin(dim=0) for name, values in spreads.items()}  # a weight goes as soon as the smaller of its groups does
    limits = torch.cat([values.flatten() for values in least.values()]).sort().values
    gone = int(sparsity * len(limits) + 1e-9)
    limit = limits[gone] if gone < len(limits) else limits[-1]
    return {name: values >= torch.minimum(limit, values.amax()) for name, values in least.items()}


def num_gone(sparsity: float, number: int) -> int:
    """Returns how many rows of a block to zero: the nearest number, of two equally near the larger, but never all of them."""
    return max(0, min(number - 1, math.floor(sparsity * number + 0.5)))


def balanced_mask(weight_OI: Tensor, blocks: Blocks, groups: Groups, sparsity: float) -> Tensor:
    """Returns which weights stay when every block loses the same share of its rows or columns, bool `[O, I]`.

    Args:
        weight_OI: float32.
        blocks: The blocks.
        groups: rows or columns.
        sparsity: Share of the rows (columns) of each block to zero.
    """
    if groups == "columns":
        return balanced_mask(weight_OI.T, Blocks(blocks.columns, blocks.rows), "rows", sparsity).T
    (piece,) = pieces(blocks, groups)
    strips = torch.split(root_mean_squares(weight_OI, piece), blocks.rows)  # [R, T] each: the rows of all blocks side by side
    stays = [highest(strip_RT.T, len(strip_RT) - num_gone(sparsity, len(strip_RT))).T for strip_RT in strips]
    return spread(torch.cat(stays), weight_OI.shape, piece)


def balanced_share(shape: tuple[int, int] | torch.Size, blocks: Blocks, groups: Groups, sparsity: float) -> float:
    """Returns the share of a matrix's weights that `balanced_mask` zeroes; depends on its shape only."""
    length, size = (shape[0], blocks.rows) if groups == "rows" else (shape[1], blocks.columns)
    return sum(num_gone(sparsity, min(size, length - start)) for start in range(0, length, size)) / length


def quantiles(weights: Mapping[str, Tensor], shapes: Sequence[Blocks]) -> dict[str, list[float]]:
    """Returns the quantiles `QUANTILES` of the groups' root mean squares, by layer."""
    found = {}
    for name, weight_OI in weights.items():
        values = torch.cat([root_mean_squares(weight_OI.cpu(), shape).flatten() for shape in shapes]).sort().values
        found[name] = [float(values[round(share * (len(values) - 1))]) for share in QUANTILES]
    return found
