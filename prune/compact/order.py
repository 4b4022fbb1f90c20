"""The order of FFN neurons: those with zeros in the same places come together, so that zeros form whole slices of the matrices.

The residual channels keep their order, so they are compared in pieces of `PIECE` channels: neuron n has the pattern

    p_n = (any W_up[n, piece] != 0  for each piece,  any W_down[piece, n] != 0  for each piece)

and neurons are sorted by p_n. Any order of the neurons gives the same outputs, as the FFN sums over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from foundation.models.architecture.structure import Structure
from prune.surgery import KeptUnits

PIECE = 32


def with_neurons_in_order(model: nn.Module, structure: Structure, kept: KeptUnits) -> KeptUnits:
    """Returns the same units with the neurons of each block in the order of their zeros; a stable sort keeps equal ones as they were.

    Args:
        model: The model.
        structure: Its structure.
        kept: Units that stay.
    """
    weights = dict(model.named_parameters())
    return replace(kept, ffn=[_in_order(weights, structure, block, kept.ffn[block]) for block in range(structure.depth)])


def _in_order(weights: dict[str, nn.Parameter], structure: Structure, block: int, neurons: Sequence[int]) -> Sequence[int]:
    patterns = []
    for name, axis in sorted(structure.ffn[block], reverse=True):
        if weights[name].ndim == 2:
            times = structure.repeated.get((name, axis), 1)
            for part in torch.chunk(weights[name].detach().movedim(axis, 0), times):
                patterns.append(_pieces(part != 0))
    if not patterns:
        return neurons
    pattern_NP = torch.cat(patterns, dim=1)
    return sorted(neurons, key=lambda neuron: pattern_NP[neuron].tolist(), reverse=True)


def _pieces(nonzero_NC: Tensor) -> Tensor:
    """Returns for each neuron and each piece of the channels whether it holds a number, bool `[N, pieces]`."""
    return torch.stack([part.any(dim=1) for part in torch.split(nonzero_NC, PIECE, dim=1)], dim=1)
