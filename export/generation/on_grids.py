"""A checkpoint as the graphs of generation are made from it: a float model, its weights on the grids of their integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from export.graph.grids import put_on_grids
from foundation.core.errors import InputError
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import with_separate_experts
from foundation.schemes.scales import Scales
from foundation.schemes.sites import load_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class OnGrids:
    """A float model and what its weights are on the grids of."""

    checkpoint: Checkpoint
    """What it was loaded from."""
    model: PreTrainedModel
    """A Transformers model in eval mode and float32."""
    layers: Mapping[str, Scales] = field(default_factory=dict)
    """Scales of linear layers by module path; none where the checkpoint is float."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Row scales of embeddings and head, float32 [V], by module path."""

    @property
    def widths(self) -> list[int]:
        """Inputs of each quantized layer."""
        modules: dict[str, Any] = dict(self.model.named_modules())
        return [modules[name].weight.shape[1] for name in self.layers]


def on_grids(checkpoint: Checkpoint) -> OnGrids:
    """Loads a checkpoint, float or quantized.

    Raises:
        InputError: Its attention products or residual additions are quantized.
    """
    model: PreTrainedModel = load_float(checkpoint.folder)
    if not checkpoint.is_quantized:
        return OnGrids(checkpoint, model)
    sites = load_sites(checkpoint.folder).names
    if sites:
        raise InputError(
            "quantize",
            f"{len(sites)} attention products or residual additions are int8, such as {sites[0]}",
            "the graph with a cache keeps those in float",
            "give attention: false and residual: false",
        )
    with_separate_experts(model)
    layers, tables = put_on_grids(model, checkpoint)
    return OnGrids(checkpoint, model, layers, tables)
