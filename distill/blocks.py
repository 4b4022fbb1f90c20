"""The repeated blocks of a Transformer, found by structure: the largest `nn.ModuleList` whose entries are all of one class.

Nothing is looked up by the name of a model. Depth is written through `num_hidden_layers`, the name under which every Transformers
config answers; a list of layer types, where a config has one, is cut along with it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from compress.errors import InputError


def repeated_blocks(model: nn.Module, key: str) -> tuple[str, nn.ModuleList]:
    """Returns the repeated blocks of a model and their module name.

    Args:
        model: A Transformers model.
        key: Key path in the recipe, for the message.

    Raises:
        InputError: There are none, or their number is not that of the config (ALBERT shares one block between all layers).
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    alike = [(name, module) for name, module in lists if len({type(block) for block in module}) == 1]
    kind, depth = model.config.model_type, getattr(model.config, "num_hidden_layers", None)  # type: ignore[union-attr]
    if not alike:
        raise InputError(f"{key}: this {kind} has no list of repeated blocks; an encoder or decoder of stacked blocks is needed")
    name, blocks = max(alike, key=lambda entry: sum(parameter.numel() for parameter in entry[1].parameters()))
    if len(blocks) != depth:
        raise InputError(f"{key}: this {kind} has {len(blocks)} blocks for {depth} layers; one block a layer is needed")
    return name, blocks


def with_layers(config: Any, layers: Sequence[int]) -> Any:
    """Returns a copy of a Transformers config with the given layers, counted from 0, and no others."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        changed.layer_types = [config.layer_types[layer] for layer in layers]
    return changed
