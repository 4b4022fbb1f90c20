"""95 % intervals of figures, drawn over groups of rows. Uses only numpy, and SciPy for quantiles.

Rows of one group are alike: questions about one text, captions of one image, blocks of one document. Drawing them one by one takes them
for independent, and the interval is too narrow. So whole groups are drawn (Davison and Hinkley 1997, section 3.8). With G groups of
sizes n_g:

    from 30 groups on   percentile bootstrap (Efron 1979): the figure of 2,000 draws of G groups with replacement, at the levels
                        Phi(-+ sqrt(G / (G-1)) t)       t = 97.5 % quantile of Student's t with G_e - 1 degrees of freedom
                        (the expanded percentile interval, Hesterberg 2015, https://arxiv.org/abs/1411.5279)
    below 30 groups     figure -+ t se                  se = sqrt((G-1)/G sum_g d_g^2), d_g: what the figure without group g is off the
                                                        mean of all of these (jackknife, Tukey 1958); t with min(G_e, G_d) - 1 degrees
    below 5 groups      none: so few groups do not show how far others may be
    G_e                 (sum n_g)^2 / sum n_g^2         groups of equal size count as G, unequal ones as fewer
    G_d                 2 G / (k - 1)                   k = G sum d_g^4 / (sum d_g^2)^2, 3 where d_g is normal: where a few groups make all
                                                        of the difference, only they count (Satterthwaite 1946)

A figure with bounds has a skewed distribution near them. Where rows share groups, or there are fewer than 30,

    a share             gets the score interval of Wilson (1927) with z = t, and for n the number of independent rows with its variance:
                        n_e = p (1-p) / se^2 (Korn and Graubard 1998); where se is 0, the number of groups
    a correlation       gets its interval on the scale of Fisher's z = atanh r

Coverage in 2,000 simulations: `tests/compress/report/test_coverage.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from foundation.core.arrays import Array

Figure = Callable[[Array], float]
"""Maps row numbers, int64 `[k]`, some of them several times, to a figure of these rows."""
RESAMPLES = 2000
CONFIDENCE = 0.95
FEW, FEWEST = 30, 5
"""Numbers of groups below which the t-interval replaces the bootstrap, and below which there is no interval."""
FEW_FOR_CORRELATIONS = 300
"""The same of correlations of rows that share groups: the bootstrap takes their spread for too small."""
LEAST_FREEDOM, TINY, LARGEST_CORRELATION = 1.0, 1e-12, 1 - 1e-12
Bounds = Literal["none", "share", "correlation"]
"""A share lies in 0..1, a correlation in -1..1."""


class Interval(NamedTuple):
    """The two ends of a confidence interval, in the unit of the figure; both None where there are too few groups."""

    low: float | None
    high: float | None


NONE = Interval(None, None)


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of rows that belong together."""

    numbers: Array
    """Number of the group of each row, int64 `[n]`."""

    @cached_property
    def _sorted(self) -> tuple[Array, Array, Array]:
        """Rows by their groups, `[n]`; first place, and size, of each group `[G]`, groups in the order of their first rows."""
        _, first, which, sizes = np.unique(self.numbers, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        sizes = sizes[order]
        return np.argsort(rank[which], kind="stable"), np.cumsum(sizes) - sizes, sizes

    @property
    def sizes(self) -> Array:
        """Rows of each group, int64 `[G]`."""
        return self._sorted[2]

    def __len__(self) -> int:
        """Returns the number of groups."""
        return len(self.sizes)

    @property
    def single(self) -> bool:
        """Whether every row is a group of its own."""
        return len(self) == len(self.numbers)

    @property
    def effective(self) -> float:
        """The number of groups of equal size that would say as much."""
        return float(self.sizes.sum()) ** 2 / float((self.sizes.astype(np.float64) ** 2).sum())

    def rows(self, chosen: Array) -> Array:
        """Returns the rows of some groups, one group after the other, int64 `[k]`; a group that is chosen twice comes twice."""
        order, starts, sizes = self._sorted
        if self.single:
            return np.asarray(order[chosen])
        counts = sizes[chosen]
        ends = np.cumsum(counts)
        return np.asarray(order[np.repeat(starts[chosen] - ends + counts, counts) + np.arange(ends[-1])])


def each_alone(num_rows: int) -> Groups:
    """Returns groups of one row each."""
    return Groups(np.arange(num_rows))


def no_interval(groups: Groups) -> str:
    """Returns in one line why there is no interval."""
    return f"{len(groups.numbers)} rows in {len(groups)} group(s) of rows that belong together; an interval needs at least {FEWEST} groups"


def interval(
    figure: Figure, groups: Groups, *, bounds: Bounds = "none", resamples: int = RESAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """Returns the interval of a figure of rows; see the top of this file.

    Args:
        figure: Called once for each draw.
        groups: The groups of the rows.
        bounds: The kind of the figure.
        resamples: Draws of the bootstrap.
        seed: Seed of the draws; equal seeds give equal intervals.
        confidence: Coverage, between 0 and 1.
    """
    if len(groups) < FEWEST:
        return NONE
    count, few = len(groups), len(groups) < (FEW_FOR_CORRELATIONS if bounds == "correlation" and not groups.single else FEW)
    every = np.arange(count)
    if few:
        drawn = np.array([figure(groups.rows(np.delete(every, group))) for group in every])
    else:
        draw = np.random.default_rng(seed)
        drawn = np.array([figure(groups.rows(draw.integers(0, count, count))) for _ in range(resamples)])
        if bounds == "none" or groups.single:
            return percentiles(drawn, groups, confidence)
    value = figure(groups.rows(every))
    if bounds == "correlation":
        value, drawn = (np.arctanh(np.clip(of, -LARGEST_CORRELATION, LARGEST_CORRELATION)) for of in (value, drawn))
    apart = drawn - drawn.mean()
    error = float(np.sqrt((count - 1) / count * (apart**2).sum() if few else (apart**2).mean() * count / (count - 1)))
    quantile = student(min(groups.effective, _contributing(apart)) if few else groups.effective, confidence)
    if bounds == "share" and 0 <= value <= 1:
        return score(value, value * (1 - value) / error**2 if error and 0 < value < 1 else count, quantile)
    ends = float(value) - quantile * error, float(value) + quantile * error
    return Interval(*map(math.tanh, ends)) if bounds == "correlation" else Interval(*ends)


def _contributing(apart: Array) -> float:
    """Returns the number of groups with normally distributed differences whose variance would be as well known: G_d."""
    squares = float((apart**2).sum())
    if not squares:
        return float(len(apart))
    return 2 * len(apart) / (len(apart) * float((apart**4).sum()) / squares**2 - 1 + TINY)


def score(share: float, n: float, z: float) -> Interval:
    """Returns the score interval of Wilson of a share of `n` independent rows, at `z` standard errors."""
    middle = share + z * z / (2 * n)
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    scale = 1 + z * z / n
    # exactly 0 and 1 at the ends, which rounding could miss by 1e-17
    return Interval(0.0 if share == 0 else (middle - half) / scale, 1.0 if share == 1 else (middle + half) / scale)


def paired_score(lost: int, gained: int, n: float, z: float) -> Interval:
    """Returns the score interval of Tango (1998, Statistics in Medicine 17, 891) of a difference of two shares of the same rows,
    `(lost - gained) / n`.

    Its ends are the differences d whose score lost - gained - n d is `z` standard errors, with the variance that is most likely at d:

        n (2 q + d (1 - d))         q: the likeliest share of gained rows at d, the larger root of
                                    2 n q^2 + ((2 n - lost + gained) d - lost - gained) q - gained d (1 - d) = 0

    Unlike the bootstrap it says something where no row changed: +- z^2 / (n + z^2).

    Args:
        lost: Rows that the first model alone gets right.
        gained: Rows that the second model alone gets right.
        n: Rows that are drawn independently.
        z: Half-width in standard errors.
    """
    from scipy.optimize import brentq

    def standard_errors(d: float) -> float:
        linear = (2 * n - lost + gained) * d - lost - gained
        q = (math.sqrt(max(linear**2 + 8 * n * gained * d * (1 - d), 0.0)) - linear) / (4 * n)
        score = lost - gained - n * d
        return score / math.sqrt(max(n * (2 * q + d * (1 - d)), TINY)) if score else 0.0

    value, edge = (lost - gained) / n, 1 - TINY
    low = -1.0 if standard_errors(-edge) <= z else brentq(lambda d: standard_errors(d) - z, -edge, value)
    high = 1.0 if standard_errors(edge) >= -z else brentq(lambda d: standard_errors(d) + z, value, edge)
    return Interval(float(low), float(high))


def percentiles(drawn: Array, groups: Groups, confidence: float = CONFIDENCE) -> Interval:
    """Returns the expanded percentile interval of what was drawn, `[resamples]`, over at least two groups."""
    from scipy.stats import norm  # takes a second to import

    level = float(norm.cdf(-student(groups.effective, confidence) * (len(groups) / (len(groups) - 1)) ** 0.5))
    low, high = np.quantile(drawn, [level, 1 - level])
    return Interval(float(low), float(high))


def student(groups: float, confidence: float = CONFIDENCE) -> float:
    """Returns the half-width of the interval of a mean in standard errors: Student's t, with one degree of freedom less than groups.

    Args:
        groups: Effective number of groups.
        confidence: Coverage, between 0 and 1.
    """
    from scipy.special import stdtrit  # also in scipy.stats, which takes a second to import

    return float(stdtrit(max(groups - 1, LEAST_FREEDOM), (1 + confidence) / 2))
