"""Which entry of its position table a text model uses for the first token; the entries before it are unusable.

RoBERTa and many models after it count positions from the padding id + 1, which the position table shows by a padding entry. So the table is
looked at, in a model without weights that is built on the meta device.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING

from foundation.models.library import REFUSED, quiet
from foundation.models.meta import on_meta_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def first_position(config: PreTrainedConfig) -> int:
    """Returns the position of the first token of a text: the padding id + 1 where positions are counted from there, else 0.

    Args:
        config: Transformers config of a text model with a position table of `max_position_embeddings` entries, or without a table.
    """
    if getattr(config, "pad_token_id", None) is None:
        return 0
    return _first_position(_Kind(config))


class _Kind:
    """A config that is equal to others with the same contents."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self.contents = config, config.to_json_string(use_diff=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self.contents == other.contents

    def __hash__(self) -> int:
        return hash(self.contents)


@lru_cache(maxsize=64)
def _first_position(kind: _Kind) -> int:
    from transformers import AutoModel

    for num_layers in (1, None):  # one layer is enough, and quick; some types refuse it
        config = copy.deepcopy(kind.config)
        try:
            if num_layers is not None:
                config.num_hidden_layers = num_layers
            with on_meta_device(), quiet():
                modules = dict(AutoModel.from_config(config).named_modules())
        except REFUSED:
            continue
        for name, module in modules.items():
            padding, table = getattr(module, "padding_idx", None), getattr(module, "weight", None)
            if "position" in name.rpartition(".")[2] and padding is not None and table is not None:
                return int(padding) + 1 if table.shape[0] == config.max_position_embeddings else 0
        return 0
    return 0  # no model of one text; the import reports what cannot be built
