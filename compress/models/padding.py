"""Padding: which rows of a tensor of activations stand for tokens.

Left out: images, which have none.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def real_rows(x: Tensor, features: Mapping[str, Tensor]) -> Tensor:
    """Returns the rows of a tensor [n, L, I] that `attention_mask` [n, L] calls real, [N, I]; all rows of a tensor of another shape."""
    mask = features.get("attention_mask")
    if mask is not None and x.dim() == 3 and x.shape[:2] == mask.shape:
        return x[mask.bool()]
    return x.reshape(-1, x.shape[-1])
