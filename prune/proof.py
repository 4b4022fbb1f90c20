"""Proof: surgery on layers, heads and neurons is exact for this model, tried on real rows before anything is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compress.core.errors import InputError
from compress.models.forward import device_of, forward
from compress.models.structure import Structure
from compress.training.train import Batch
from prune.masks import Gate, masked
from prune.places import Places
from prune.sensitivity import silenced_all
from prune.surgery import Kept, shrink

TOLERANCE = 1e-3


def prove(model: nn.Module, structure: Structure, kept: Kept, batch: Batch, key: str) -> None:
    """Sees to it that a model without some of its layers, heads and neurons answers as it does with them silent.

    A kind of model may do something to all heads at once, or treat a layer by its number.

    Args:
        model: The model, in evaluation mode.
        structure: Its structure.
        kept: What is kept of it.
        batch: Some rows.
        key: Key path of the stage, for messages.

    Raises:
        InputError: It does not.
    """
    some = replace(Kept.everything(structure.sizes), layers=kept.layers, heads=kept.heads, ffn=kept.ffn)
    gone = [block for block in range(structure.depth) if block not in set(kept.layers)]
    few = {name: value[:2] for name, value in batch.features.items()}
    small = shrink(model, structure, some, key).to(device_of(model))
    closed: dict[Any, Gate] = {(block, "layer"): lambda training: torch.zeros(()) for block in gone}
    with torch.inference_mode():
        with silenced_all(model, structure, Places.of(model, structure), some), masked(model, structure, closed):
            expected = forward(model, few)
        difference = float((forward(small, few) - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= TOLERANCE:
        config: Any = model.config
        raise InputError(
            f"{key}: a {config.model_type} without some of its {'layers, ' if gone else ''}heads or neurons answers other than with them "
            "silent; it cannot be pruned"
        )
