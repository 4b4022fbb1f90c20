"""Padding: selects the activations of real tokens. Images have no padding.

The mask of an encoder-decoder's batch tells the tokens of the source. The decoder reads the target behind a start token, which may be the
padding token itself (T5): its real tokens are all up to the last one that is not padding, and the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

MASKED: Final = -30000.0
"""Added to the scores of padding. exp(-30000 + score) is 0 in float32 as with the lowest float, and float16 can still hold it."""


def read_by_decoder(decoder_ids_bL: Tensor, pad: int) -> Tensor:
    """Returns which tokens of a decoder's inputs, int64 `[b, L]`, are not padding, bool `[b, L]`."""
    real_bL = decoder_ids_bL != pad
    before_last_bL = real_bL.flip(1).cummax(dim=1).values.flip(1)
    before_last_bL[:, 0] = True
    return before_last_bL


def mask_of(features: Mapping[str, Tensor], length: int) -> Tensor | None:
    """Returns which of `length` tokens, or frames of a waveform, are not padding, bool `[b, L]`; None where a batch has no mask.

    The mask of a waveform counts samples. Convolutions make fewer frames of them, evenly spaced: a frame is real where the sample at its
    place is, so that one that ends in padding counts.

    Args:
        features: Features of the batch.
        length: Tokens, or frames at any depth of the model.
    """
    mask = features.get("attention_mask")
    if mask is None:
        return None
    mask_bL = mask.bool()
    return mask_bL if mask_bL.shape[1] == length else mask_bL[:, torch.arange(length, device=mask.device) * mask_bL.shape[1] // length]


def real_rows(x: Tensor, features: Mapping[str, Tensor], channel_axis: int = -1) -> Tensor:
    """Returns the rows of [n, L, I] where `attention_mask` is set (`mask_of`), as [N, I]; all rows if `x` has another shape.

    Args:
        x: The tensor.
        features: Features of the batch that it was computed from.
        channel_axis: Axis of I; 1 for what a convolution reads and writes, [n, I, L] or [n, I, H, W].
    """
    x = x.movedim(channel_axis, -1)
    mask = features.get("attention_mask")
    if mask is not None and x.dim() == 3 and (x.shape[:2] == mask.shape or ("input_values" in features and len(x) == len(mask))):
        return x[mask_of(features, x.shape[1])]
    return x.reshape(-1, x.shape[-1])
