"""Proof: checks on calibration rows that removing layers, heads and neurons is exact for this model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foundation.core.errors import InputError
from foundation.models.architecture.structure import Structure
from foundation.models.forward import device_of, forward
from foundation.models.library import REFUSED, one_line
from foundation.training.train import Batch
from prune.hook_points import HookPoints
from prune.masks.masks import Gate, masked
from prune.sensitivity import silenced_all
from prune.surgery import KeptUnits, shrink

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOLERANCE = 1e-3


def prove(model: nn.Module, structure: Structure, kept: KeptUnits, batch: Batch, key: str) -> None:
    """Checks that a model without some layers, heads and neurons gives the same outputs as with those units set to 0.

    Some architectures mix all heads in one operation, or treat a layer by its index; surgery would change their outputs.

    Args:
        model: The model before surgery, in evaluation mode.
        structure: Its structure.
        kept: Units that surgery keeps.
        batch: Calibration rows; the first two are used.
        key: Key path of the stage, for messages.

    Raises:
        InputError: The outputs differ, or the smaller model does not run.
    """
    some = replace(KeptUnits.everything(structure.sizes), layers=kept.layers, heads=kept.heads, cross=kept.cross, ffn=kept.ffn)
    gone = [block for block in range(structure.depth) if block not in set(kept.layers)]
    few = {name: value[:2] for name, value in batch.features.items()}
    small = shrink(model, structure, some, key).to(device_of(model))
    closed: dict[Any, Gate] = {(block, "layer"): lambda training: torch.zeros(()) for block in gone}
    config: PreTrainedConfig = model.config
    about = f"a {config.model_type} without some of its {'layers, ' if gone else ''}heads or neurons"
    with torch.no_grad():
        with silenced_all(model, structure, HookPoints.of(model, structure), some), masked(model, structure, closed):
            expected = forward(model, few)
        try:
            answer = forward(small, few)
        except REFUSED as error:  # a part outside its layers has a size for each head
            raise InputError(key, f"{about} does not run ({one_line(error)})", "it cannot be pruned") from error
        difference = float((answer - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= TOLERANCE:
        raise InputError(key, f"{about} gives other outputs than with them set to 0", "it cannot be pruned")
