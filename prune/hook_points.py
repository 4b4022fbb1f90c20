"""Hook points: the modules whose inputs or outputs carry one value, or one head, per prunable unit.

    heads     input of the attention output projection: the heads side by side
    cross     the same for the attention of a decoder's block to the encoder
    ffn       input of the layer that reads the FFN neurons (W_down)
    experts   routing weights of each token's experts
    hidden    outputs of all norms over the residual stream
    layers    input and output of a block

A gate at a hook point (`prune.gates`) scales the unit; the values there are the unit's activations (`prune.activation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foundation.models.architecture.residual import norms_of, owner_of
from foundation.models.architecture.structure import Structure
from foundation.models.inputs.padding import mask_of, read_by_decoder
from foundation.models.inputs.sounds import frames_of
from foundation.models.layers.listed_experts import is_listed
from prune.cost import Component

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class HookPoints:
    """Module paths of the hook points, by block."""

    heads: tuple[str, ...]
    """Output projections of the attention to a block's own tokens."""
    cross: tuple[str | None, ...]
    """Output projections of the attention to the encoder; None in blocks without."""
    ffn: tuple[str | None, ...]
    """Layers that read the FFN neurons; None in blocks with experts."""
    experts: tuple[str | None, ...]
    """Modules that hold the experts, called with (states `[N, D]`, experts of each token `[N, k]`, routing weights `[N, k]`), or as
    `foundation.models.layers.listed_experts` says; or None."""
    norms: tuple[str, ...]
    """All norms over the residual stream, of the whole model."""
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, structure: Structure) -> HookPoints:
        """Finds the hook points of a model."""
        matrices = {name for name, value in model.state_dict().items() if value.ndim == 2}
        readers: list[str | None] = []
        expert_modules: list[str | None] = []
        for ffn, experts in zip(structure.ffn, structure.experts, strict=True):
            found = [owner_of(name) for name, axis in sorted(ffn) if axis == 1 and name in matrices]
            readers.append(found[0] if len(found) == 1 else None)
            both = {name for name, _ in experts} & {name for name, _ in ffn}
            stacked = sorted({owner_of(name) for name in both})
            expert_modules.append(stacked[0] if len(stacked) == 1 else None)
        for block, name in enumerate(structure.blocks):
            listed = [f"{name}.{inner}" for inner, module in model.get_submodule(name).named_modules() if is_listed(module)]
            if len(listed) == 1 and structure.experts[block]:
                expert_modules[block] = listed[0]
        return cls(
            tuple(attention.output for attention in structure.attentions),
            tuple(None if (one := structure.cross_attentions.get(block)) is None else one.output for block in range(structure.depth)),
            tuple(readers),
            tuple(expert_modules),
            norms_of(model, structure),
            structure.blocks,
        )

    def at(self, block: int, what: Component) -> str | None:
        """Returns the hook point of a component of a block; None if there is none."""
        points: Mapping[Component, Sequence[str | None]] = {
            "heads": self.heads,
            "cross": self.cross,
            "ffn": self.ffn,
            "experts": self.experts,
        }
        return points[what][block]


def token_masks(model: nn.Module, structure: Structure, features: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns which tokens of a batch are not padding, bool `[b, L]`, for each stack of the model: source and target have other tokens."""
    config: PreTrainedConfig = model.config
    given = next(iter(features.values()))
    length = structure.attentions[0].tokens
    if given.dim() == 2:  # texts, or waveforms: the others have one size
        length = frames_of(config, given.shape[1]) if "input_values" in features else given.shape[1]
    mask = mask_of(features, length)
    if mask is None:
        mask = torch.ones(len(given), length, dtype=torch.bool)
    if len(structure.stacks) == 1:
        return [mask]
    if "decoder_input_ids" in features:
        return [mask, read_by_decoder(features["decoder_input_ids"], config.pad_token_id)]
    return [mask, mask]  # a classifier's decoder reads the source as well
