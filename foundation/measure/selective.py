"""Selective prediction: how well the confidence of a model ranks the rows that it gets wrong last.

    AUROC     P(a right row is surer than a wrong one) + P(equal) / 2 (Mann and Whitney 1947)
    risk(k)   share of wrong rows among the k surest (El-Yaniv and Wiener 2010, Journal of Machine Learning Research 11)
    AURC      mean of risk(k) over k = 1 ... n, the area under the curve of risk against coverage k / n (Geifman et al. 2019,
              https://arxiv.org/abs/1805.08206)

Wrong is what the caller says: here a row that the original model answers otherwise. Among equally sure rows no order is better than
another, so that each counts with the share of wrong rows among them. Scores that are NaN are the least sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from foundation.core.arrays import Array


def auroc(scores: Array, wrong: Array) -> float | None:
    """Returns the area under the ROC curve; None where all rows are right, or all are wrong.

    Args:
        scores: Larger is surer, float64 `[n]`.
        wrong: bool `[n]`.
    """
    from scipy.stats import rankdata

    bad = int(wrong.sum())
    good = len(wrong) - bad
    if not good or not bad:
        return None
    ranks = rankdata(_known(scores))
    return float((ranks[~wrong].sum() - good * (good + 1) / 2) / (good * bad))


def risks(scores: Array, wrong: Array) -> Array:
    """Returns the share of wrong rows among the 1, 2, ..., n surest rows, float64 `[n]`.

    Args:
        scores: Larger is surer, float64 `[n]`.
        wrong: bool `[n]`.
    """
    known = _known(scores)
    order = np.argsort(-known, kind="stable")
    _, place, counts = np.unique(-known[order], return_inverse=True, return_counts=True)
    share = np.bincount(place, weights=wrong[order].astype(np.float64)) / counts
    return np.asarray(np.cumsum(share[place]) / np.arange(1, len(known) + 1))


def aurc(scores: Array, wrong: Array) -> float:
    """Returns the area under the curve of risk against coverage, 0 to 1; smaller is better. At least one row."""
    return float(risks(scores, wrong).mean())


def _known(scores: Array) -> Array:
    return np.where(np.isnan(scores), -np.inf, scores)
