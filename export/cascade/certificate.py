"""Certificates: tests of the hypothesis that a risk is above a bound, and what follows from them. Uses only numpy and SciPy.

unit          what a user sends; units are independent draws from the traffic that the certificate is about
binomial      losses 0 and 1, k of n are 1:  p = P(Bin(n, bound) <= k), which is exact
betting       losses in [0, 1], m the bound: a gambler bets that losses are smaller than m, with the capital

                  K_t = prod_i (1 + lambda_i (m - x_i)),    0 <= lambda_i <= c / (1 - m),    p = min(1, 1 / max_t K_t)

              Where the mean is m or more the capital does not grow in expectation, however lambda_i depends on earlier losses, so that
              p is valid by Ville's inequality (Waudby-Smith and Ramdas 2024, https://arxiv.org/abs/2010.09686). The bet is theirs:
              lambda_i = sqrt(2 log(1 / alpha) / (n s_(i-1)^2)), s^2 the variance of the losses so far, c = 0.75
both          a point that has to keep two bounds takes the larger p: it is wrong only where one of the two is
path          points in an order that other rows have fixed, tested one after the other at the whole alpha until the first failure. The
              probability that a point passes whose risk is above the bound is at most alpha (fixed-sequence testing; Learn then Test,
              Angelopoulos et al. 2021, https://arxiv.org/abs/2110.01052)
upper limit   of a share: Clopper and Pearson 1934, one-sided
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foundation.core.arrays import Array

LARGEST_BET = 0.75
"""Share of the capital that one loss can cost."""


def alpha_of(confidence: float) -> float:
    """Returns the level of a test: one minus the confidence, without the rounding error of the difference."""
    return round(1 - confidence, 12)


def binomial_p(errors: int, n: int, bound: float) -> float:
    """Returns the p-value of "the risk is above the bound" for losses 0 and 1.

    Args:
        errors: Units with loss 1.
        n: Units.
        bound: The bound, above 0 and below 1.
    """
    from scipy.special import bdtr  # scipy takes long to import

    return 1.0 if errors >= n else float(bdtr(errors, n, bound))


def betting_p(losses: Array, bound: float, low: float, high: float, alpha: float) -> float:
    """Returns the p-value of "the mean is above the bound" for bounded losses; 1 where the bound is no bound.

    Args:
        losses: Losses in an order that does not depend on them, float64 `[n]`.
        bound: The bound, in their unit.
        low: The least possible loss.
        high: The largest possible loss.
        alpha: The level that the bets are made for; the p-value is valid at every level.
    """
    if not len(losses) or bound <= low:
        return 1.0
    if bound >= high:
        return 0.0
    scaled, limit = (np.asarray(losses, np.float64) - low) / (high - low), (bound - low) / (high - low)
    count = np.arange(1, len(scaled) + 1)
    mean = (0.5 + np.cumsum(scaled)) / (count + 1)
    variance = (0.25 + np.cumsum((scaled - mean) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])  # a bet may not know the loss that it is about
    bets = np.minimum(np.sqrt(2 * math.log(1 / alpha) / (len(scaled) * before)), LARGEST_BET / (1 - limit))
    growth = np.cumsum(np.log1p(bets * (limit - scaled)))
    return min(1.0, math.exp(-float(growth.max())))


def fixed_sequence(p_values: Sequence[float], alpha: float) -> int | None:
    """Returns the number of the last point that passes before the first one that fails; None where the first one fails.

    Args:
        p_values: The p-value of each point, in the order of the path.
        alpha: One minus the confidence.
    """
    chosen = None
    for number, p_value in enumerate(p_values):
        if not p_value <= alpha:
            break
        chosen = number
    return chosen


def upper_limit(units: int, n: int, alpha: float) -> float:
    """Returns the upper confidence limit of a share that `units` of `n` have, at confidence 1 - alpha."""
    from scipy.special import betaincinv

    return 1.0 if units >= n else float(betaincinv(units + 1, n - units, 1 - alpha))


def units_needed(bound: float, alpha: float, errors: int = 0) -> int:
    """Returns the fewest units with which a bound is certified if `errors` of them have loss 1."""
    most = max(errors + 1, 2)
    while binomial_p(errors, most, bound) > alpha:
        most *= 2
    least = errors
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if binomial_p(errors, middle, bound) <= alpha else (middle, most)
    return most


def most_errors(n: int, bound: float, alpha: float) -> int | None:
    """Returns the most units with loss 1 with which `n` units certify a bound; None where none is allowed."""
    passing = [number for number in range(math.ceil(n * bound) + 1) if binomial_p(number, n, bound) <= alpha]
    return passing[-1] if passing else None


def allowed_share(n: int, bound: float, alpha: float) -> float:
    """Returns the largest share of `n` units with loss 1 with which they certify a bound; 0 where not even none of them does."""
    return (most_errors(n, bound, alpha) or 0) / n
