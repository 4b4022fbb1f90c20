"""Target layers: the layers that get zeros, and whether the pattern can reach the target sparsity in each of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from foundation.core.errors import InputError, Problem, nearest
from foundation.core.progress import Progress
from foundation.models.architecture.blocks import block_of, blocks_of
from foundation.training.kept_zeros import block_linears
from prune.sparsify.lasso import balanced_share, pieces
from prune.sparsify.patterns import NM, Blocks, reachable
from prune.sparsify.settings import SparsifySettings
from prune.sparsify.sparsegpt import reachable_by_strips

TOLERANCE = 0.05
"""Largest allowed distance between the target sparsity and the sparsity that whole blocks can reach in a layer."""


def target_layers(settings: SparsifySettings, model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers of the blocks that get zeros, by module name.

    Args:
        settings: Settings of the stage.
        model: The model; may be on the meta device.

    Raises:
        InputError: No layer is left, or a name pattern matches no layer.
    """
    blocks = tuple(blocks_of(model, settings.key))
    layers = {name: layer for name, layer in block_linears(model).items() if block_of(name, blocks) is not None}
    examples = f"layers are named like {', '.join(list(layers)[:3])}"
    given = {f"{settings.key}.exclude": settings.exclude, f"{settings.key}.lasso.strengths": tuple(settings.lasso.strengths or ())}
    problems = [
        Problem(key, f"{pattern!r} matches no layer", f"{examples}{nearest(pattern, layers)}")
        for key, patterns in given.items()
        for pattern in patterns
        if not fnmatch.filter(layers, pattern)
    ]
    if problems:
        raise InputError.of(problems)
    chosen = {name: layer for name, layer in layers.items() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.exclude)}
    if not chosen:
        raise InputError(f"{settings.key}.exclude", "every linear layer in the blocks is excluded", remedy="shorten exclude")
    return chosen


def check_reachable(settings: SparsifySettings, layers: Mapping[str, nn.Linear]) -> None:
    """Checks that whole blocks can come close to the target sparsity.

    Raises:
        InputError: In some layer they cannot.
    """
    reached = {shape: reachable_sparsity(settings, *shape) for shape in {layer.weight.shape for layer in layers.values()}}
    far = {name: layer for name, layer in layers.items() if abs(reached[layer.weight.shape] - settings.target) > TOLERANCE}
    if far:
        name, layer = next(iter(far.items()))
        raise InputError(
            f"{settings.key}.pattern",
            f"{settings.zeros} given",
            f"in {len(far)} of {len(layers)} layers the nearest reachable sparsity is more than {TOLERANCE:g} "
            f"away from sparsity: {settings.target:g} ({reached[layer.weight.shape]:.3f} in {name}, {layer.out_features} "
            f"x {layer.in_features})",
            "use smaller blocks, or name these layers in exclude",
        )


def reachable_sparsity(settings: SparsifySettings, outputs: int, inputs: int) -> float:
    """Returns the sparsity that the stage reaches in a matrix `[outputs, inputs]`."""
    blocks, shape, target = settings.zeros, (outputs, inputs), settings.target
    if not isinstance(blocks, Blocks):  # slices are counted over all layers, whose number of groups is large
        return target
    if settings.method == "sparsegpt":
        return reachable_by_strips(shape, blocks, target) / (outputs * inputs)
    groups = pieces(blocks, settings.lasso.groups) if settings.method == "lasso" else (blocks,)
    if settings.method == "lasso" and settings.lasso.ranking == "balanced":
        return balanced_share(shape, blocks, settings.lasso.groups, target)
    if settings.method == "lasso" and settings.lasso.ranking == "model":  # over all layers, whose number of groups is large
        return target
    if len(groups) > 1:  # rows and columns overlap: single lines can be added until the target is met
        return target
    return reachable(shape, groups[0], target) / (outputs * inputs)


def warn_of_dense_weights(settings: SparsifySettings, model: nn.Module, layers: Mapping[str, nn.Linear], progress: Progress) -> None:
    """Warns about weights that stay dense, or whose last N:M group is incomplete.

    Args:
        settings: Settings of the stage.
        model: The sparse model.
        layers: The layers that got zeros.
        progress: Receives the warnings.
    """
    label, pattern = settings.title, settings.zeros
    blocks = tuple(blocks_of(model, settings.key))
    stacked = [name for name, weight in model.named_parameters() if weight.ndim == 3 and block_of(name, blocks) is not None]
    if stacked:
        num_blocks = len({block_of(name, blocks) for name in stacked})
        progress.warn(f"{label}: {len(stacked)} stacked expert weights in {num_blocks} blocks stay dense, first {stacked[0]}")
    if isinstance(pattern, NM):
        ragged = {name: layer for name, layer in layers.items() if layer.in_features % pattern.group}
        if ragged:
            name, layer = next(iter(ragged.items()))
            progress.warn(
                f"{label}: {len(ragged)} layers have a number of inputs that is not a multiple of {pattern.group}, first {name} "
                f"({layer.in_features}): their last group of {pattern} is incomplete, and no {pattern} kernel accepts them"
            )
