"""Checks by its config whether a decoder caches keys and values in every layer, or something else.

The graph of `export.generation.cached_graph` holds keys and values. Layers with a state of fixed size (Mamba, RWKV, linear attention, the
convolutions of LFM2) overwrite it with every token, some layers keep an index next to keys and values (DeepSeek V3.2), and old models keep
nothing. Transformers says of each layer of a config what cache it has; a model that keeps nothing does not take `past_key_values`.

Left out: what only a forward pass shows; `cached_graph` looks at that.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from foundation.models.library import REFUSED, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Caches of keys and values, of all tokens or of a window; the last stands for a layer that reads the cache of another one."""


def missing_keys(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    """Returns in one line why a decoder does not keep keys and values of every layer; None where it does.

    Args:
        config: Its Transformers config.
        model_class: The class that is built from it.
    """
    if "past_key_values" not in inspect.signature(model_class.forward).parameters:
        return f"this {config.model_type} keeps none"
    try:
        layers = DynamicCache(config=config).layers
    except REFUSED as error:
        return f"Transformers cannot tell what this {config.model_type} keeps ({one_line(error)})"
    others = [type(layer).__name__ for layer in layers if type(layer) not in KEYS_AND_VALUES]
    if not others:
        return None
    return f"this {config.model_type} keeps something else in {len(others)} of {len(layers)} layers ({', '.join(sorted(set(others)))})"
