"""Scales of int4 weights: one per output and group of inputs, clipped if that lowers the error.

    s = argmin over c in (0.5 ... 1.0) of  d H_gg d^T,    d = W_g - Q(W_g; c * max |W_g| / 7)

where H_gg is the block of H = mean of x x^T for the inputs of the group; without H it is the identity, which gives the squared error of the
weights. One of the c is 7/8: with it the largest weight, if negative, gets exactly the code -8.

The search ignores that H couples the groups of an output, so it may make an output worse: `best_scale` compares the error of whole outputs
and keeps the better scales for each.

Tensor names carry their shapes: I inputs, O outputs, G groups, g inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.schemes.int4 import HIGH, LOW, Int4Scales, group_scale, num_groups
from compress.schemes.int8 import SMALLEST_SCALE, quantize
from quantize.moments import output_errors

CLIPS = tuple(step / 40 for step in range(20, 40))


def clipped_scale(weight_OI: Tensor, group_size: int, hessian_II: Tensor | None = None) -> Tensor:
    """Returns the scale with the least error for each group, float32 [O, G].

    Args:
        weight_OI: float32.
        group_size: Inputs that share a scale; the last group may be shorter.
        hessian_II: Mean of x x^T over the inputs, float32; None for the squared error of the weights.
    """
    groups_GOg = _grouped(weight_OI, group_size)
    blocks_Ggg = None if hessian_II is None else diagonal_blocks(hessian_II, group_size)
    full_OG = best_OG = group_scale(weight_OI, group_size)
    error_OG = _errors(groups_GOg, full_OG, blocks_Ggg)
    for clip in CLIPS:
        scale_OG = (full_OG * clip).clamp(min=SMALLEST_SCALE)
        candidate_OG = _errors(groups_GOg, scale_OG, blocks_Ggg)
        better_OG = candidate_OG < error_OG
        best_OG, error_OG = torch.where(better_OG, scale_OG, best_OG), torch.where(better_OG, candidate_OG, error_OG)
    return best_OG


def best_scale(weight_OI: Tensor, group_size: int, hessian_II: Tensor) -> Tensor:
    """Returns for each output the scales found with or without H, whichever have the smaller output error, float32 [O, G]."""
    with_OG, without_OG = clipped_scale(weight_OI, group_size, hessian_II), clipped_scale(weight_OI, group_size)
    error_O, plain_O = (
        output_errors(weight_OI, Int4Scales(scale_OG, group_size).on_grid(weight_OI), hessian_II) for scale_OG in (with_OG, without_OG)
    )
    return torch.where((error_O < plain_O)[:, None], with_OG, without_OG)


def diagonal_blocks(hessian_II: Tensor, group_size: int) -> Tensor:
    """Returns the diagonal block of H for each group, float32 [G, g, g]; padded with zeros."""
    groups = num_groups(len(hessian_II), group_size)
    missing = groups * group_size - len(hessian_II)
    padded_II = nn.functional.pad(hessian_II, (0, missing, 0, missing))
    return padded_II.reshape(groups, group_size, groups, group_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _grouped(weight_OI: Tensor, group_size: int) -> Tensor:
    """Returns the weights by group, float32 [G, O, g]; padded with zeros."""
    outputs, inputs = weight_OI.shape
    groups = num_groups(inputs, group_size)
    return nn.functional.pad(weight_OI, (0, groups * group_size - inputs)).reshape(outputs, groups, group_size).transpose(0, 1)


def _errors(groups_GOg: Tensor, scale_OG: Tensor, blocks_Ggg: Tensor | None) -> Tensor:
    """Returns the error of each group, float32 [O, G]."""
    scale_GO1 = scale_OG.T[:, :, None]
    difference_GOg = quantize(groups_GOg, scale_GO1, LOW, HIGH).float() * scale_GO1 - groups_GOg
    weighted_GOg = difference_GOg if blocks_Ggg is None else difference_GOg @ blocks_Ggg
    return (weighted_GOg * difference_GOg).sum(dim=2).T
