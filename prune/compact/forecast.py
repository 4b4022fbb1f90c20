"""Forecast of `compact`, for checks and plans: `sparsify` of slices notes its share in the planned config, and `compact` reads the note.

Every block is expected to lose the same share of its head groups and of its slices, and to keep at least one of each. A target speed-up is
approximated by its share of the weights. Which slices a run really zeroes is known only afterwards. Blocks with experts keep all, and so do
heads with a table of relative positions (T5).
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

from foundation.models.architecture.shapes import on_meta, with_sizes
from foundation.models.architecture.structure import HEAD_KINDS, Structure
from prune.cost import count_of, with_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTE = "expected_empty_slices"
"""Attribute of a config that is never saved: the share of the slices that zeros disconnect, and the neurons of a slice."""


def with_empty_slices(config: PreTrainedConfig, share: float, neurons: int) -> PreTrainedConfig:
    """Returns the config of a model after slices of it are zeroed.

    Args:
        config: Config of the model before.
        share: Share of the slices that are zeroed, from 0 to 1.
        neurons: Neurons of a slice.
    """
    changed = copy.deepcopy(config)
    setattr(changed, NOTE, (share, neurons))
    return changed


def compacted(config: PreTrainedConfig, key: str) -> PreTrainedConfig:
    """Returns the expected config without the noted slices; the same object if none are noted.

    Args:
        config: Config of the model before.
        key: Key path of the stage, for messages.
    """
    if not hasattr(config, NOTE):
        return config
    plain = copy.deepcopy(config)
    share, neurons = getattr(plain, NOTE)
    delattr(plain, NOTE)
    structure = Structure.of(on_meta(plain), key)
    sizes = structure.sizes
    for block in range(structure.depth):
        if sizes.experts[block]:
            continue
        for heads in () if structure.tables else HEAD_KINDS:
            if groups := count_of(sizes, block, heads):
                sizes = with_count(sizes, block, heads, max(1, round((1 - share) * groups)))
        if width := count_of(sizes, block, "ffn"):
            slices = max(1, round((1 - share) * math.ceil(width / neurons)))
            sizes = with_count(sizes, block, "ffn", min(width, slices * neurons))
    return with_sizes(plain, sizes, key)
