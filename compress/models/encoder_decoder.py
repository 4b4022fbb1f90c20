"""Answers of an encoder-decoder in torch by `generate` of Transformers, which depend on the model and the search alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compress.core.decoding import end_ids
from compress.models.forward import device_of
from compress.models.library import quiet

BATCH_SIZE = 64
Ids = NDArray[np.int32]


def encoder_decoder_settings() -> dict[str, Any]:
    """Returns the settings beside the limits of an answer.

    Limits that a model's generation_config.json sets (n-grams, least length, the last token) do not apply; its first token does. The cache
    is given because Transformers makes one of as many layers as the encoder has.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    neutral = {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "early_stopping": False}
    return {**neutral, "forced_eos_token_id": None, "bad_words_ids": None, "use_cache": True, "past_key_values": cache}


def answered(model: Any, sources: Sequence[Ids], beams: int, tokens: int) -> list[Ids]:
    """Returns the answer to each source, int32 [length], with its end token unless it is cut at `tokens`.

    Args:
        model: An encoder-decoder of Transformers in evaluation mode.
        sources: Token ids, int32 [length] each.
        beams: Beams of the search.
        tokens: Most tokens of an answer.
    """
    device, answers = device_of(model), [np.zeros(0, np.int32)] * len(sources)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    ends = end_ids(model.generation_config.eos_token_id)
    for start in range(0, len(order), BATCH_SIZE):
        chosen = order[start : start + BATCH_SIZE]
        lengths = torch.tensor([len(sources[index]) for index in chosen])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.zeros_like(mask)
        ids[mask.bool()] = torch.from_numpy(np.concatenate([sources[index] for index in chosen]).astype(np.int64))
        limits = {"max_new_tokens": tokens, "do_sample": False, "num_beams": beams, "repetition_penalty": 1.0, "pad_token_id": 0}
        with torch.inference_mode(), quiet():
            found = model.generate(ids.to(device), attention_mask=mask.to(device), **limits, **encoder_decoder_settings())
        for index, row in zip(chosen, found[:, 1:].cpu().numpy().astype(np.int32), strict=True):
            stop = next((at + 1 for at, token in enumerate(row.tolist()) if token in ends), len(row))
            answers[index] = row[:stop]
    return answers
