"""Anytime-valid test that a rate is at most a bound: an e-process that bets against it, from any moment on.

    X_1, X_2, ... in [0, 1]     one value for each request
    H0                          E[X_i | X_1 .. X_{i-1}] <= u, the bound
    bets                        p_k > u, weights w_k;  lambda_k = (p_k - u) / (u (1 - u))
    moments                     v_s = c(s - 1) - c(s),  c(s) = 1 / (1 + ln(1 + s)):  the share of the capital that starts at value s

    E_t = sum_k sum_{s <= t} w_k v_s prod_{i=s..t} (1 + lambda_k (X_i - u))  +  c(t)

For X_i in {0, 1} a factor is the likelihood ratio of the rates p_k and u. Under H0 no factor is above 1 in the mean, so E_t is a
supermartingale from E_0 = 1, and Ville's inequality bounds the probability of a false alarm over all time, however often one looks:

    P(there is a t with E_t >= 1 / alpha) <= alpha

Betting: Waudby-Smith and Ramdas, https://arxiv.org/abs/2010.09686. The mixture over moments is what lets a shift after a long quiet time
be seen soon: it costs ln t + 2 ln ln t, while capital that was bet from the first value on would be lost by then. (Shin, Ramdas and
Rinaldo, https://arxiv.org/abs/2203.03532, bound the mean time to a false alarm instead.) The state is one number for each bet:

    a_k <- (a_k + w_k v_t) (1 + lambda_k (X_t - u))

so time and memory of a value do not grow with t. All of it is computed as logarithms: no length of the stream under- or overflows.

Left out: bets that learn from the values, and rates that may change below the bound in any known way.

Standalone (standard library and numpy): a served cascade holds a copy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BETS = 20
"""Number of the bets."""
SMALLEST, GROWTH = 0.05, 1.32
"""Distance of the first bet from the bound in logits, and how many times as far each further one is."""
MOST_LOG = 600.0
"""What capital may grow or fall by before its logarithm is taken: e to the power of 709 is no float64."""
Array = NDArray[np.float64]


class EProcess:
    """The state of the test; or of many tests of one bound, of which every step brings each as many values.

    Args:
        bound: The bound u of the rate, in (0, 1).
        shape: Shape of the tests; (): one.

    Raises:
        ValueError: No value speaks against the bound, or any does.
    """

    def __init__(self, bound: float, shape: tuple[int, ...] = ()) -> None:
        if not 0 < bound < 1:
            raise ValueError(f"a bound of {bound:g} cannot be tested; it must be above 0 and below 1")
        self.bound, self.count = bound, 0
        rates = _alternatives(bound)
        self._slopes = (rates - bound) / (bound * (1 - bound))
        self._most = max(1, int(MOST_LOG / max(np.log(rates / bound).max(), -np.log((1 - rates) / (1 - bound)).min())))
        self._capital: Array = np.full((*shape, BETS), -np.inf)
        self._largest: Array = np.zeros(shape)

    def update(self, values: Array) -> None:
        """Takes the next values, one after the other; only after the last of them it looks for an alarm.

        Args:
            values: One for each request, float64 [..., m], in [0, 1].

        Raises:
            ValueError: A value is outside [0, 1], or NaN.
        """
        if not np.all((values >= 0) & (values <= 1)):
            raise ValueError(f"values from {values.min()} to {values.max()} given; 0 to 1 is allowed")
        count = values.shape[-1]
        if not count:
            return
        for start in range(0, count, self._most):
            self._take(values[..., start : start + self._most])
        self._largest = np.maximum(self._largest, self.log_values)

    @property
    def log_values(self) -> Array:
        """ln E_t of each test, float64 [...]."""
        if not self.count:
            return np.zeros_like(self._largest)
        total: Array = np.logaddexp(_log_sum(self._capital, -1), -math.log1p(math.log1p(self.count)))
        return total

    @property
    def largest(self) -> Array:
        """The largest ln E_t so far of each test, float64 [...], at least 0; looked at after each `update`."""
        return self._largest

    def alarms(self, probability: float) -> NDArray[np.bool_]:
        """Returns whether each test has ever refuted its bound; the probability that it does so wrongly, ever, is at most this one."""
        alarms: NDArray[np.bool_] = self._largest >= -math.log(probability)
        return alarms

    def _take(self, values: Array) -> None:
        """Takes at most `_most` values; each capital in units of what it was before, in which it cannot overflow."""
        count = values.shape[-1]
        starts = self._starts(count)
        unit = np.maximum(self._capital, math.log(starts[0]))
        capital, new = np.exp(self._capital - unit), np.exp(-unit)
        for place in range(count):
            capital = (capital + starts[place] * new) * (1 + self._slopes * (values[..., place, None] - self.bound))
        self._capital = np.log(capital) + unit
        self.count += count

    def _starts(self, count: int) -> Array:
        """Returns w_k v_s of the next values, float64 [count], without the difference of close numbers."""
        before = self.count + np.arange(count + 1.0)
        after = 1 + np.log1p(before)
        starts: Array = np.log1p(1 / (1 + before[:-1])) / after[:-1] / after[1:] / BETS
        return starts


def _log_sum(values: Array, axis: int) -> Array:
    """Returns ln of the sum of exp(values) along an axis; all values are finite."""
    most = values.max(axis=axis, keepdims=True)
    total: Array = np.log(np.exp(values - most).sum(axis=axis)) + most.squeeze(axis)
    return total


def _alternatives(bound: float) -> Array:
    """Returns the rates p_k that are bet on, float64 [BETS], ascending, above the bound and below 1."""
    logits = math.log(bound) - math.log1p(-bound) + SMALLEST * GROWTH ** np.arange(BETS)
    rates: Array = 1 / (1 + np.exp(-logits))
    return rates
