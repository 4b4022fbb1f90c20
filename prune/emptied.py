"""What zeros have emptied: whole outputs and inputs of layers, neurons and heads that a model would answer the same without.

    outputs   rows of W that are 0: only the bias is left of them
    inputs    columns of W that are 0: whatever is there, nobody reads it
    neurons   inputs of the layer that reads the neurons of an FFN
    heads     all inputs that a group of heads gives to the layer that reads attention

Neurons and heads that nobody reads can be taken out by the stage `prune`, which changes shapes. Left out: what nobody feeds; experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from compress.models.structure import Structure
from prune.places import Places


def emptied(weight_OI: Tensor) -> dict[str, int]:
    """Returns how many `outputs` and `inputs` of a weight are 0 from end to end."""
    nonzero_OI = weight_OI.detach() != 0
    return {"outputs": int((~nonzero_OI.any(dim=1)).sum()), "inputs": int((~nonzero_OI.any(dim=0)).sum())}


def unread(model: nn.Module, structure: Structure) -> Mapping[str, int]:
    """Returns how many groups of `heads` and how many `neurons` nobody reads, over all blocks."""
    places, counts = Places.of(model, structure), {"heads": 0, "neurons": 0}
    for block, attention in enumerate(structure.attentions):
        read_OI = model.get_submodule(places.heads[block]).weight.detach() != 0  # type: ignore[operator]
        counts["heads"] += int((~read_OI.any(dim=0).reshape(attention.key_value_heads, -1).any(dim=1)).sum())
        neurons = places.ffn[block]
        if neurons is not None:
            counts["neurons"] += emptied(model.get_submodule(neurons).weight)["inputs"]  # type: ignore[arg-type]
    return counts
