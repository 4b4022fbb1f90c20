"""Finds the lengths at which the positions of a decoder change, and Transformers reads the text again.

LongRoPE turns keys by its short factors up to `original_max_position_embeddings` tokens, and by its long ones after. An answer that
crosses this length has keys of the first kind in its cache. `generate` of Phi 3 drops the cache there and reads the whole text again; for
other models it continues with both kinds. Engines that answer do the same (`foundation.standalone.stretches`), so that they give the
tokens of Transformers.

Left out: searches with beams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def original_positions(config: PreTrainedConfig) -> int | None:
    """Returns the number of tokens up to which a model was trained before its positions were stretched; None where they were not.

    Args:
        config: Transformers config of a text model.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    maps = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # one for all layers, or one for each kind of layer
    found = [one["original_max_position_embeddings"] for one in maps if one.get("original_max_position_embeddings")]
    return int(max(found)) if found else None


def read_again_at(model: PreTrainedModel) -> int | None:
    """Returns the number of tokens at which `generate` of Transformers reads a text again; None where it never does.

    Args:
        model: A decoder of Transformers. What it does is asked; no name of a model is looked for.
    """
    original = original_positions(model.config.get_text_config())
    if original is None:
        return None
    layer = DynamicLayer()
    layer.update(torch.zeros(1, 1, original, 1), torch.zeros(1, 1, original, 1))
    cache = DynamicCache()
    cache.layers = [layer]
    ids = torch.zeros(1, original + 1, dtype=torch.int64)
    prepared = model.prepare_inputs_for_generation(ids, past_key_values=cache, attention_mask=torch.ones_like(ids), use_cache=True)
    return original + 1 if prepared.get("past_key_values") is None else None
