"""Routing: how much every expert of a mixture has to do, counted on real rows.

    load_e = tokens that have e among their k experts / (k * tokens)        shares of one block, which sum to 1

An even router gives 1 / E to each. Load alone says nothing of what an expert adds to its tokens, which is what the scores measure
(`prune.scores`); it says whether what is left after pruning is used, and whether one expert becomes the bottleneck of a server. Padding
does not count. Left out: the load of each device where experts are spread over several.

Tensor names carry their shapes: N tokens, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.structure import Structure
from compress.training.train import Batch
from prune.places import Places, token_mask


@torch.inference_mode()
def loads(model: nn.Module, structure: Structure, batches: Iterable[Batch]) -> list[list[float]]:
    """Returns the load of every expert of every block; an empty list for a block without experts.

    Args:
        model: In evaluation mode.
        structure: Its structure.
        batches: Calibration rows.
    """
    counts = [torch.zeros(number, dtype=torch.int64) for number in structure.sizes.experts]
    mask_bL = torch.zeros(0, 0, dtype=torch.bool)

    def counting(block: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            chosen_Nk: Tensor = args[1]
            counts[block] += torch.bincount(chosen_Nk.cpu()[mask_bL.flatten()].flatten(), minlength=len(counts[block]))

        return hook

    handles = [
        model.get_submodule(str(name)).register_forward_pre_hook(counting(block))
        for block, name in enumerate(Places.of(model, structure).experts)
        if name is not None
    ]
    try:
        for batch in batches:
            mask_bL = token_mask(batch.features, structure.attentions[0].tokens).cpu()
            model(**batch.features)
    finally:
        for handle in handles:
            handle.remove()
    return [(count / max(1, int(count.sum()))).tolist() for count in counts]
