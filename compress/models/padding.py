"""Padding: selects the activations of real tokens. Images have no padding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def real_rows(x: Tensor, features: Mapping[str, Tensor], channel_axis: int = -1) -> Tensor:
    """Returns the rows of [n, L, I] where `attention_mask` [n, L] is set, as [N, I]; all rows if `x` has another shape.

    Args:
        x: The tensor.
        features: Features of the batch that it was computed from.
        channel_axis: Axis of I; 1 for what a convolution reads and writes, [n, I, L] or [n, I, H, W].
    """
    x = x.movedim(channel_axis, -1)
    mask = features.get("attention_mask")
    if mask is not None and x.dim() == 3 and x.shape[:2] == mask.shape:
        return x[mask.bool()]
    return x.reshape(-1, x.shape[-1])
