"""Proof: surgery on heads and neurons is exact for this model, tried on real rows before anything is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compress.errors import InputError
from compress.model import device_of, forward
from compress.structure import Structure
from compress.train import Batch
from prune.places import Places
from prune.sensitivity import silenced_all
from prune.surgery import Kept, shrink

TOLERANCE = 1e-3


def prove(model: nn.Module, structure: Structure, kept: Kept, batch: Batch, key: str) -> None:
    """Sees to it that a model without some of its heads and neurons answers as it does with them silent.

    A kind of model may do something to all heads at once.

    Args:
        model: The model, in evaluation mode.
        structure: Its structure.
        kept: What is kept of it.
        batch: Some rows.
        key: Key path of the stage, for messages.

    Raises:
        InputError: It does not.
    """
    some = replace(Kept.everything(structure.sizes), heads=kept.heads, ffn=kept.ffn)
    few = {name: value[:2] for name, value in batch.features.items()}
    small = shrink(model, structure, some, key).to(device_of(model))
    with torch.inference_mode():
        with silenced_all(model, structure, Places.of(model, structure), some):
            expected = forward(model, few)
        difference = float((forward(small, few) - expected).abs().max() / expected.abs().max().clamp(min=1))
    if difference > TOLERANCE:
        config: Any = model.config
        raise InputError(
            f"{key}: a {config.model_type} without some of its heads or neurons answers other than with them silent; it cannot be pruned"
        )
