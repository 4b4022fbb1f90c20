"""Successive halving (Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943) on several objectives.

Of n candidates that were judged alike, ceil(keep n) go on: those of the best layers (`compress.search.front`), and of the layer that does
not fit whole the most isolated. A candidate that stays is therefore never dominated by one that is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from compress.search.front import Losses, ranked


def survivors(points: Mapping[int, Losses], keep: float) -> list[int]:
    """Returns the candidates that stay, best first.

    Args:
        points: The losses of each candidate, smaller is better.
        keep: Share that goes on, above 0 and at most 1; at least one does.
    """
    return ranked(points)[: math.ceil(keep * len(points) - 1e-9)]
