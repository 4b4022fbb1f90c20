"""Chance: every unit gets a random score, which a method that measures something has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prune.cost import count_of
from prune.selection import COMPONENTS, Scores

if TYPE_CHECKING:
    from prune.methods import Scoring


def chance(given: Scoring) -> Scores:
    """Returns random scores in [0, 1), the same for the same model shape."""
    draw, structure = torch.Generator().manual_seed(0), given.structure
    sizes = {(block, what): count_of(structure.sizes, block, what) for block in range(structure.depth) for what in COMPONENTS}
    components = {part: torch.rand(size, generator=draw) for part, size in sizes.items() if size}
    return Scores(components, torch.rand(structure.depth, generator=draw), torch.rand(structure.sizes.hidden, generator=draw))
