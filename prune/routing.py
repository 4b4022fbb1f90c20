"""Routing: the load of each expert of a mixture, counted on calibration rows.

    load_e = tokens that have e among their k experts / (k * tokens)        sums to 1 over the experts of a block

A balanced router gives each expert 1 / E. The load shows whether the experts left after pruning are used, and whether one of them will be
the bottleneck of a server. It does not show how much an expert contributes to its tokens: importance scores do (`prune.scores`). Padding is
not counted. Not supported: load per device with experts spread over several devices.

Tensor names carry their shapes: N tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import Structure
from foundation.models.layers.listed_experts import gates_of, is_listed
from foundation.training.train import Batch
from prune.hook_points import HookPoints, token_masks


@torch.no_grad()
def loads(model: nn.Module, structure: Structure, batches: Iterable[Batch]) -> list[list[float]]:
    """Returns the load of every expert, by block; an empty list for a block without experts.

    Args:
        model: In evaluation mode.
        structure: Its structure.
        batches: Calibration rows.
    """
    counts = [torch.zeros(number, dtype=torch.int64) for number in structure.sizes.experts]
    masks: list[Tensor] = []

    def counting(block: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        stack = structure.stack_of(structure.blocks[block])

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            chosen, is_token_N = args[1].cpu(), masks[stack].flatten()
            if is_listed(module):
                counts[block] += (gates_of(module, chosen, args[2].cpu())[is_token_N] != 0).sum(dim=0)
                return
            counts[block] += torch.bincount(chosen[is_token_N].flatten(), minlength=len(counts[block]))

        return hook

    handles = [
        model.get_submodule(str(name)).register_forward_pre_hook(counting(block))
        for block, name in enumerate(HookPoints.of(model, structure).experts)
        if name is not None
    ]
    try:
        for batch in batches:
            masks = [mask_bL.cpu() for mask_bL in token_masks(model, structure, batch.features)]
            model(**batch.features)
    finally:
        for handle in handles:
            handle.remove()
    return [(count / max(1, int(count.sum()))).tolist() for count in counts]
