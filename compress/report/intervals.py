"""Confidence intervals of metrics on n rows, and of the difference between two models.

Accuracy gets the score interval of Wilson (1927), which stays inside [0, 1] and keeps its coverage near both ends:

    (p + z^2/2n  +-  z sqrt(p (1-p) / n  +  z^2 / 4n^2)) / (1 + z^2/n)          p = successes / n, z = 1.96 for 95 %

Every other metric gets the percentile bootstrap (Efron 1979): the metric of 2,000 samples of n rows drawn with replacement. Two models
are compared on the same rows, so each sample is drawn once for both (paired bootstrap; Koehn 2004, https://aclanthology.org/W04-3250).
Rows that both models get right, or both get wrong, cancel; the interval is far narrower than the two single intervals suggest.

For accuracy only two counts of a sample matter: rows that went from right to wrong (r of n) and from wrong to right (w of n). Drawing n
rows and counting both is one draw of Multinomial(n, (r/n, w/n, 1 - r/n - w/n)), so no rows are resampled.

For perplexity whole blocks are drawn, because the tokens of a block are correlated; a block enters by the sum of its nll and its number of
tokens. The loss is relative: after / before - 1 = exp(mean nll after - mean nll before) - 1, so the interval is computed for the difference
of the means and then transformed.

Limitations: no bias correction (BCa), which changes little at the size of a test set, and no correction for comparing many variants. If no
row changed, the paired interval is [0, 0]; it says nothing about untested rows.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compress.core.forms.next_token import IGNORED, block_sums, choices, mean_nll, perplexity_of
from compress.measure.metrics import METRICS, Metric, as_values, num_predictions

Array = NDArray[Any]
Figure = Callable[[Array, Array], float]
"""Maps predictions `[n, ...]` and labels `[n]` to a number."""

RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """The two ends of a confidence interval, in the unit of the figure."""

    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Returns the Wilson score interval of a share.

    Args:
        successes: Number of successes, 0 to `n`.
        n: Rows, at least 1.
        confidence: Coverage, between 0 and 1.

    Raises:
        ValueError: `n` is not positive, or `successes` lies outside 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n} given; a share needs n >= 1 and 0 <= successes <= n")
    z2, share = NormalDist().inv_cdf((1 + confidence) / 2) ** 2, successes / n
    middle = share + z2 / (2 * n)
    half = (z2 * (share * (1 - share) / n + z2 / (4 * n * n))) ** 0.5
    scale = 1 + z2 / n
    # exactly 0 and 1 at the ends, which rounding could miss by 1e-17
    low = 0.0 if successes == 0 else (middle - half) / scale
    high = 1.0 if successes == n else (middle + half) / scale
    return Interval(low, high)


def bootstrap(
    metric: Figure, predictions: Array, labels: Array, *, resamples: int = RESAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """Returns the percentile bootstrap interval of `metric(predictions, labels)`.

    Args:
        metric: Called once for each resample.
        predictions: `[n, ...]`, logits or values.
        labels: `[n]`.
        resamples: Samples with replacement.
        seed: Seed of the draws; equal seeds give equal intervals.
        confidence: Coverage, between 0 and 1.

    Raises:
        ValueError: There are no rows, or the numbers of predictions and labels differ.
    """
    rows = _rows(labels, predictions)
    draw = np.random.default_rng(seed)
    samples = (draw.integers(0, rows, rows) for _ in range(resamples))
    return _percentiles(np.array([metric(predictions[sample], labels[sample]) for sample in samples]), confidence)


def paired_bootstrap(
    metric: Metric,
    before: Array,
    after: Array,
    labels: Array,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Returns the paired percentile bootstrap interval of what a metric lost.

    Both predictions are `[n, ...]` in the same row order; see `bootstrap` for the other arguments.

    Raises:
        ValueError: There are no rows, or the three differ in length.
    """
    rows = _rows(labels, before, after)
    draw = np.random.default_rng(seed)
    differences = np.empty(resamples)
    for index in range(resamples):
        sample = draw.integers(0, rows, rows)
        differences[index] = metric.drop(metric.of(before[sample], labels[sample]), metric.of(after[sample], labels[sample]))
    return _percentiles(differences, confidence)


def paired_counts(lost: int, gained: int, n: int, *, resamples: int = RESAMPLES, seed: int = 0, confidence: float = CONFIDENCE) -> Interval:
    """Returns the paired bootstrap interval of an accuracy difference `(lost - gained) / n` from two counts.

    Args:
        lost: Rows that went from right to wrong.
        gained: Rows that went from wrong to right.
        n: Number of rows, at least 1.
        resamples: Samples with replacement.
        seed: Seed of the draws.
        confidence: Coverage, between 0 and 1.
    """
    assert 0 <= lost + gained <= n, (lost, gained, n)
    draws = np.random.default_rng(seed).multinomial(n, [lost / n, gained / n, (n - lost - gained) / n], size=resamples)
    return _percentiles((draws[:, 0] - draws[:, 1]) / n, confidence)


def single(metric: Metric, predictions: Array, labels: Array, *, seed: int = 0) -> dict[str, Any]:
    """Returns a metric with its 95 % interval: Wilson for `accuracy`, bootstrap otherwise (over blocks for `perplexity`).

    Args:
        metric: A row of `METRICS`, or any other.
        predictions: `[n, ...]`.
        labels: `[n]`.
        seed: Seed of the bootstrap.

    Returns:
        `value`, `low`, `high` and `n` (rows; tokens where labels are tokens).
    """
    predictions, labels = as_values(predictions, labels)  # of texts whole pairs are drawn
    rows = _rows(labels, predictions)
    if metric is METRICS["accuracy"] and labels.ndim == 1:
        low, high = wilson(int(np.sum(predictions.argmax(axis=1) == labels)), rows)
    elif metric is METRICS["perplexity"]:
        low, high = bootstrap(perplexity_of, *block_sums(predictions, labels), seed=seed)
    else:
        low, high = bootstrap(metric.of, predictions, labels, seed=seed)
    return {"value": metric.of(predictions, labels), "low": low, "high": high, "n": num_predictions(labels)}


def paired(metric: Metric, before: Array, after: Array, labels: Array, *, seed: int = 0) -> dict[str, Any]:
    """Compares two sets of predictions for the same rows.

    Args:
        metric: A row of `METRICS`, or any other; `accuracy` needs no resampling of rows and is fast.
        before: Predictions of the reference, `[n, ...]`.
        after: Predictions of the model under test, in the same row order.
        labels: `[n]`, integers are class ids; or tokens `[n, T]`.
        seed: Seed of the bootstrap.

    Returns:
        `difference` (`Metric.drop`; positive is a loss), its 95 % paired bootstrap interval `low` and `high`, `n`, and the number of rows
        (tokens) that went `right_to_wrong`, went `wrong_to_right` or `changed` at all; these three are None unless labels are classes.

    Raises:
        ValueError: There are no rows, or the three differ in length.
    """
    (before, _), (after, labels) = as_values(before, labels), as_values(after, labels)
    rows, counts = _rows(labels, before, after), dict.fromkeys(("right_to_wrong", "wrong_to_right", "changed"))
    if not np.issubdtype(labels.dtype, np.integer):
        low, high = paired_bootstrap(metric, before, after, labels, seed=seed)
        difference = metric.drop(metric.of(before, labels), metric.of(after, labels))
        return {"difference": difference, "low": low, "high": high, "n": rows, **counts}
    if labels.ndim == 2:
        return _paired_tokens(metric, before, after, labels, seed)
    first, second = before.argmax(axis=1), after.argmax(axis=1)
    lost, gained = int(np.sum((first == labels) & (second != labels))), int(np.sum((first != labels) & (second == labels)))
    if metric is METRICS["accuracy"]:
        difference, (low, high) = (lost - gained) / rows, paired_counts(lost, gained, rows, seed=seed)
    else:
        difference = metric.drop(metric.of(before, labels), metric.of(after, labels))
        low, high = paired_bootstrap(metric, before, after, labels, seed=seed)
    found = {"right_to_wrong": lost, "wrong_to_right": gained, "changed": int(np.sum(first != second))}
    return {"difference": difference, "low": low, "high": high, "n": rows, **found}


def _paired_tokens(metric: Metric, before: Array, after: Array, labels: Array, seed: int) -> dict[str, Any]:
    """Compares two sets of token predictions `[n, T, 2]` for the same blocks; see `paired`."""
    if metric is METRICS["perplexity"]:
        (sums, tokens), (others, _) = block_sums(before, labels), block_sums(after, labels)
        falls = paired_bootstrap(Metric(mean_nll), sums, others, tokens, seed=seed)
        difference = perplexity_of(others, tokens) / perplexity_of(sums, tokens) - 1
        low, high = float(np.expm1(-falls.high)), float(np.expm1(-falls.low))
    else:
        difference = metric.drop(metric.of(before, labels), metric.of(after, labels))
        low, high = paired_bootstrap(metric, before, after, labels, seed=seed)
    first, second = (choices(answers)[labels != IGNORED] for answers in (before, after))
    targets = labels[labels != IGNORED]
    return {
        "difference": difference,
        "low": low,
        "high": high,
        "n": len(targets),
        "right_to_wrong": int(np.sum((first == targets) & (second != targets))),
        "wrong_to_right": int(np.sum((first != targets) & (second == targets))),
        "changed": int(np.sum(first != second)),
    }


def _rows(labels: Array, *predictions: Array) -> int:
    lengths = {len(labels), *(len(prediction) for prediction in predictions)}
    if len(lengths) != 1 or not len(labels):
        raise ValueError(
            f"labels {labels.shape}, predictions {[p.shape for p in predictions]}: all need the same number of rows, at least 1"
        )
    return len(labels)


def _percentiles(values: Array, confidence: float) -> Interval:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))
