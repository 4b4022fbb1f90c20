"""Padding: selects the activations of real tokens. Images have no padding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def real_rows(x: Tensor, features: Mapping[str, Tensor]) -> Tensor:
    """Returns the rows of [n, L, I] where `attention_mask` [n, L] is set, as [N, I]; all rows if `x` has another shape."""
    mask = features.get("attention_mask")
    if mask is not None and x.dim() == 3 and x.shape[:2] == mask.shape:
        return x[mask.bool()]
    return x.reshape(-1, x.shape[-1])
