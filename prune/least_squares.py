"""Least squares: update the remaining columns of a layer to compensate for the removed ones, on calibration rows.

A layer y = W x + b reads attention or the FFN neurons. Of its inputs only the set K stays, the set R is removed. With G = sum x x^T over
the tokens of the calibration rows, [I, I],

    W'_K = W_K + W_R G_RK (G_KK + lambda I)^-1,       lambda = damping * mean of the diagonal of G_KK

minimizes sum ||W x - W'_K x_K||^2 + lambda ||W'_K - W_K||^2: the Optimal Brain Surgeon update for whole columns (Hassibi and Stork 1993;
for structured pruning Kurtic et al. 2023, https://arxiv.org/abs/2302.04089, section 3.1). A bias is treated as the column of a constant
input 1; it always stays and is not damped. If the model's zeros are held (`foundation.training.kept_zeros`), each output has its own
problem over its nonzero weights; conjugate gradients solve all of them together. Limitations: G is taken from the model before surgery, so
changes in earlier layers are ignored. Not supported: experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import HEAD_KINDS, Structure
from foundation.training.kept_zeros import NOTE
from foundation.training.train import Batch
from prune.hook_points import HookPoints, token_masks
from prune.surgery import KeptUnits, head_numbers

DAMPING = 0.01
STEPS, TOLERANCE = 500, 1e-8  # of conjugate gradients: most steps, and the residual to stop at


def surviving(
    weight_OI: Tensor, gram_II: Tensor, kept: Tensor, damping: float = DAMPING, constant: bool = False, free_OK: Tensor | None = None
) -> Tensor:
    """Returns the remaining columns after the update, float32 `[O, K]`.

    Args:
        weight_OI: Weights of the layer, float `[O, I]`.
        gram_II: Sum of x x^T over tokens, float64 `[I, I]`.
        kept: Inputs that stay, int64 `[K]`, ascending.
        damping: lambda as a fraction of the mean diagonal; keeps the update small where inputs carry little signal.
        constant: Whether the last input is the constant 1 of a bias, which is not damped.
        free_OK: Weights that may change, bool; None for all.
    """
    gone = torch.tensor(sorted(set(range(weight_OI.shape[1])) - set(kept.tolist())), dtype=torch.int64)
    if not len(gone):
        return weight_OI[:, kept]
    weight_OI = weight_OI.double()
    gram_KK, gram_RK = gram_II[kept][:, kept].clone(), gram_II[gone][:, kept]
    diagonal_K = gram_KK.diagonal()  # a view: adding to it changes the matrix
    damped = slice(None, -1) if constant else slice(None)
    diagonal_K[damped] += damping * diagonal_K[damped].mean() + 1e-12
    if constant:
        diagonal_K[-1] += 1e-12
    wanted_OK = weight_OI[:, gone] @ gram_RK
    update_OK = torch.linalg.solve(gram_KK, wanted_OK.T).T if free_OK is None else solve_some(gram_KK, wanted_OK, free_OK)
    updated_OK: Tensor = (weight_OI[:, kept] + update_OK).float()
    return updated_OK


def solve_some(matrix_KK: Tensor, wanted_OK: Tensor, free_OK: Tensor) -> Tensor:
    """Solves (u A)_k = wanted_k for each output over its free k, with u_k = 0 elsewhere; returns u, float64 `[O, K]`.

    Conjugate gradients on all outputs at once, scaled so that the diagonal of A is 1 (Hestenes and Stiefel 1952).

    Args:
        matrix_KK: A, symmetric and positive definite, float64.
        wanted_OK: Right-hand side, float64.
        free_OK: Entries of u that may differ from 0, bool.
    """
    unit_K = matrix_KK.diagonal().rsqrt()
    scaled_KK = matrix_KK * unit_K * unit_K[:, None]
    residual_OK = wanted_OK * unit_K * free_OK
    found_OK, direction_OK = torch.zeros_like(residual_OK), residual_OK.clone()
    power_O1 = start_O1 = residual_OK.square().sum(dim=1, keepdim=True)
    for _ in range(STEPS):
        if bool((power_O1 <= TOLERANCE**2 * start_O1).all()):
            break
        image_OK = (direction_OK @ scaled_KK) * free_OK
        step_O1 = power_O1 / (direction_OK * image_OK).sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        found_OK += step_O1 * direction_OK
        residual_OK -= step_O1 * image_OK
        before_O1, power_O1 = power_O1, residual_OK.square().sum(dim=1, keepdim=True)
        direction_OK = residual_OK + power_O1 / before_O1.clamp(min=torch.finfo(torch.float64).tiny) * direction_OK
    return found_OK * unit_K


def update(model: nn.Module, structure: Structure, kept: KeptUnits, batches: Iterable[Batch]) -> None:
    """Updates the layers that read attention and FFN neurons, in place; surgery must follow.

    Args:
        model: The model before surgery, in evaluation mode.
        structure: Its structure.
        kept: Units that surgery keeps.
        batches: Calibration rows.
    """
    wanted = readers(model, structure, kept)
    if not wanted:
        return
    grams = gram_matrices(model, structure, list(wanted), batches)
    for name, numbers in wanted.items():
        layer: Any = model.get_submodule(name)
        weight_OI, bias_O = layer.weight.detach(), layer.bias
        if bias_O is not None:
            weight_OI, numbers = (
                torch.cat([weight_OI, bias_O.detach()[:, None]], dim=1),
                torch.cat([numbers, torch.tensor([layer.in_features])]),
            )
        free_OK = None
        if getattr(model.config, NOTE, False):
            free_OK = weight_OI.cpu()[:, numbers] != 0
            if bias_O is not None:
                free_OK[:, -1] = True
        updated_OK = surviving(weight_OI.cpu(), grams[name], numbers, constant=bias_O is not None, free_OK=free_OK)
        if bias_O is not None:
            layer.bias.data = updated_OK[:, -1].to(bias_O)
            updated_OK, numbers = updated_OK[:, :-1], numbers[:-1]
        layer.weight.data[:, numbers] = updated_OK.to(layer.weight)


def readers(model: nn.Module, structure: Structure, kept: KeptUnits) -> dict[str, Tensor]:
    """Returns the inputs that stay, int64, for each layer that loses inputs, by module name."""
    hooks, found = HookPoints.of(model, structure), {}
    for block in kept.layers:
        for what in HEAD_KINDS:
            of_heads, reader = structure.of_heads(block, what), hooks.at(block, what)
            if of_heads is not None and reader is not None and len(kept.units(block, what)) < of_heads[0].key_value_heads:
                found[reader] = head_numbers(kept.units(block, what), of_heads[0].group, of_heads[0].head_dim)["query"]
        neurons = hooks.ffn[block]
        if neurons is not None and len(kept.ffn[block]) < structure.sizes.ffn[block]:
            found[neurons] = torch.tensor(kept.ffn[block])
    return found


def gram_matrices(model: nn.Module, structure: Structure, layers: Sequence[str], batches: Iterable[Batch]) -> Mapping[str, Tensor]:
    """Returns the sum of x x^T over all tokens except padding, float64 `[I, I]`, by layer; layers with a bias have an extra input of 1."""
    sums: dict[str, Tensor] = {}
    masks: list[Tensor] = []

    def keep(name: str) -> Callable[[nn.Linear, tuple[Tensor, ...]], None]:
        def hook(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
            mask_bL = masks[structure.stack_of(name)]
            x_NI = args[0].reshape(*mask_bL.shape, -1)[mask_bL.to(args[0].device)]
            if module.bias is not None:
                x_NI = torch.cat([x_NI, torch.ones_like(x_NI[:, :1])], dim=1)
            product = (x_NI.T @ x_NI).double().cpu()
            sums[name] = sums[name] + product if name in sums else product

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in layers]
    try:
        with torch.no_grad():
            for batch in batches:
                masks[:] = token_masks(model, structure, batch.features)
                model(**batch.features)
    finally:
        for handle in handles:
            handle.remove()
    return sums
