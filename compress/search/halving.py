"""Successive halving (Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943) on several objectives.

Of n candidates on one rung, ceil(keep n) are promoted. The best non-dominated layers (`compress.search.front`) come first. If a layer does
not fit as a whole, its most isolated candidates are taken. So no promoted candidate is dominated by a dropped one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from compress.search.front import Losses, ranked


def survivors(points: Mapping[int, Losses], keep: float) -> list[int]:
    """Returns the candidates that stay, best first.

    Args:
        points: The losses of each candidate, smaller is better.
        keep: Share of the candidates to promote, above 0 and at most 1; at least one is promoted.
    """
    return ranked(points)[: math.ceil(keep * len(points) - 1e-9)]
