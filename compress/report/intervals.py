"""Confidence intervals of metrics, and of the difference between two models.

Accuracy gets the score interval of Wilson (1927), which stays inside [0, 1] and keeps its coverage near both ends:

    (p + z^2/2n  +-  z sqrt(p (1-p) / n  +  z^2 / 4n^2)) / (1 + z^2/n)          p = successes / n, z = 1.96 for 95 %

Every other metric gets the bootstrap: the metric of 2,000 samples drawn with replacement. Two models are compared on the same rows, so each
sample is drawn once for both (paired bootstrap; Koehn 2004, https://aclanthology.org/W04-3250). Rows that both models get right, or both
get wrong, cancel; the interval is far narrower than the two single intervals suggest.

Rows that belong together (`foundation.data.groups`) are drawn together: `foundation.core.resampling` says how, and what takes the place of
the bootstrap where there are few groups.

For accuracy of rows that are drawn one by one only two counts matter: rows that went from right to wrong and from wrong to right. Their
difference gets the score interval of Tango (`foundation.core.resampling.paired_score`), which keeps its coverage where few rows change: no
change in 360 rows says that the difference is at most 1.06 points.

A share that is 0 or 1, such as F1 of a class that is never predicted, is the same in every sample, and the bootstrap would end in
[0, 0] or [1, 1]. It gets the score interval of Wilson over the n groups that hold a row on which it depends, with Student's t for z. F1 is
2 J / (1 + J) of the share J = tp / (tp + fp + fn) of the rows that have the class or are found to have it, so J gets the interval and F1
its ends ("Wilson direct", Lam et al. 2023, https://arxiv.org/abs/2309.14621). Without such a row, and for correlations of answers that are
all alike, the figure is 0 by convention, and there is no interval.

For perplexity whole blocks are drawn, because the tokens of a block are correlated; a block enters by the sum of its nll and its number of
tokens. The loss is relative: after / before - 1 = exp(mean nll after - mean nll before) - 1, so the interval is computed for the difference
of the means and then transformed.

Limitations: no bias correction (BCa), which changes little at the size of a test set, and no correction for comparing many variants. If no
row changed, the paired interval of every other metric is [0, 0]; it says nothing about untested rows. Rows whose relation the data do not
name (pages of one site, sentences of one author) are drawn one by one.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from foundation.artifacts.figures import Accuracy, Drop
from foundation.core import resampling
from foundation.core.arrays import Array
from foundation.core.resampling import CONFIDENCE, NONE, RESAMPLES, Bounds, Groups, Interval, each_alone, paired_score, score, student
from foundation.labels.form import Figure, Labels
from foundation.labels.next_token import LARGEST_EXPONENT, block_sums, mean_nll, perplexity_of
from foundation.measure.metrics import METRICS, Metric

NO_ROW = "no row has the class, or is found to have it"
ALIKE = "all predictions or all labels are alike, which leaves a correlation undefined"
Explained = TypeVar("Explained", Accuracy, Drop)


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
    return score(successes / n, n, NormalDist().inv_cdf((1 + confidence) / 2))


def bootstrap(
    metric: Figure,
    predictions: Array,
    labels: Array,
    *,
    groups: Groups | None = None,
    bounds: Bounds = "none",
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Returns the interval of `metric(predictions, labels)`.

    Args:
        metric: Called once for each draw.
        predictions: `[n, ...]`, logits or values.
        labels: `[n]`.
        groups: Which rows are drawn together; None: each is drawn alone.
        bounds: The kind of the metric.
        resamples: Samples with replacement.
        seed: Seed of the draws; equal seeds give equal intervals.
        confidence: Coverage, between 0 and 1.

    Raises:
        ValueError: There are no rows, or the numbers of predictions, labels and rows of groups differ.
    """
    groups = _groups(groups, _rows(labels, predictions))
    how = {"bounds": bounds, "resamples": resamples, "seed": seed, "confidence": confidence}
    return resampling.interval(lambda rows: metric(predictions[rows], labels[rows]), groups, **how)  # type: ignore[arg-type]


def paired_bootstrap(
    metric: Metric,
    before: Array,
    after: Array,
    labels: Array,
    *,
    groups: Groups | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Returns the paired interval of what a metric lost.

    Both predictions are `[n, ...]` in the same row order; see `bootstrap` for the other arguments.

    Raises:
        ValueError: There are no rows, or the numbers of rows differ.
    """

    def lost(rows: Array) -> float:
        return metric.drop(metric.of(before[rows], labels[rows]), metric.of(after[rows], labels[rows]))

    groups = _groups(groups, _rows(labels, before, after))
    return resampling.interval(lost, groups, resamples=resamples, seed=seed, confidence=confidence)


def paired_counts(lost: int, gained: int, n: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Returns the paired interval of an accuracy difference `(lost - gained) / n` of rows that are drawn one by one, from two counts.

    Args:
        lost: Rows that went from right to wrong.
        gained: Rows that went from wrong to right.
        n: Number of rows, at least 1.
        confidence: Coverage, between 0 and 1.
    """
    assert 0 <= lost + gained <= n, (lost, gained, n)
    return paired_score(lost, gained, n, NormalDist().inv_cdf((1 + confidence) / 2))


def single(metric: Metric, predictions: Array, labels: Labels, *, groups: Array | None = None, seed: int = 0) -> Accuracy:
    """Returns a metric with its 95 % interval: Wilson for `accuracy` of rows drawn one by one, else over groups (`perplexity`: of blocks).

    Args:
        metric: A row of `METRICS`, or any other.
        predictions: `[n, ...]`.
        labels: Their labels.
        groups: Number of the group of each value, int `[m]` (`foundation.data.groups`); None: each is a group of its own.
        seed: Seed of the bootstrap.

    Returns:
        `value`, `low`, `high`, `n` (rows; tokens where labels are tokens), and `groups`, over how many the interval is drawn. Where these
        are too few `low` and `high` are None, and `interval_reason` says so.
    """
    values, true = labels.values(predictions)  # of texts whole pairs are drawn
    rows = _rows(true, values)
    drawn = _groups(None if groups is None else Groups(groups), rows)
    if metric is METRICS["accuracy"] and drawn.single:
        found = wilson(int(np.sum(values.argmax(axis=1) == true)), rows)
    elif metric is METRICS["perplexity"]:
        nll = bootstrap(mean_nll, *block_sums(values, true), groups=drawn, seed=seed)
        found = Interval(*(None if end is None else math.exp(min(end, LARGEST_EXPONENT)) for end in nll))
    else:
        found = bootstrap(metric.of, values, true, groups=drawn, bounds=_bounds(metric), seed=seed)
        found, undefined = _at_an_end(metric, values, true, drawn, found)
        if undefined:
            return Accuracy(value=metric.of(values, true), n=labels.count(), interval_reason=undefined)
    return _explained(Accuracy(value=metric.of(values, true), low=found.low, high=found.high, groups=len(drawn), n=labels.count()), drawn)


def _at_an_end(metric: Metric, values: Array, true: Array, groups: Groups, found: Interval) -> tuple[Interval, str]:
    """Returns the interval of a metric, where every draw may have been the same, and why it has none (empty where it has).

    Args:
        metric: The metric.
        values: Predictions `[n, ...]`, as `Labels.values` returns them.
        true: Labels `[n, ...]`.
        groups: Groups of the rows.
        found: The interval of the draws.
    """
    value = metric.of(values, true)
    if metric.is_correlation and found == (0, 0):
        return NONE, ALIKE
    if found.low is None or not metric.is_share or value not in ((0, 1) if metric.higher_is_better else (0,)):
        return found, ""
    rows, is_f1 = metric.made_of(values, true)
    if bool(rows.all()) and found.low != found.high:
        return found, ""
    count = len(np.unique(groups.numbers[rows]))
    if not count:
        return NONE, NO_ROW
    ends = score(value, count, student(count))
    return Interval(*(None if end is None else 2 * end / (1 + end) for end in ends)) if is_f1 else ends, ""


def paired(metric: Metric, before: Array, after: Array, labels: Labels, *, groups: Array | None = None, seed: int = 0) -> Drop:
    """Compares two sets of predictions for the same rows.

    Args:
        metric: A row of `METRICS`, or any other; `accuracy` of rows drawn one by one needs no resampling and is fast.
        before: Predictions of the reference, `[n, ...]`.
        after: Predictions of the model under test, in the same row order.
        labels: Their labels.
        groups: See `single`.
        seed: Seed of the bootstrap.

    Returns:
        `difference` (`Metric.drop`; positive is a loss), its paired 95 % interval `low` and `high`, `n`, `groups` (as in `single`), and the
        number of rows (tokens) that went `right_to_wrong`, went `wrong_to_right` or `changed` at all; these three are None unless labels
        are classes.

    Raises:
        ValueError: There are no rows, or the three differ in length.
    """
    (ours, _), (theirs, true) = labels.values(before), labels.values(after)
    rows = _rows(true, ours, theirs)
    changes, (lost, gained) = _changes(labels.choices(before), labels.choices(after))
    drawn = _groups(None if groups is None else Groups(groups), rows)
    if metric is METRICS["accuracy"] and drawn.single:
        difference, found = (lost - gained) / rows, paired_counts(lost, gained, rows)
    elif metric is METRICS["perplexity"]:
        (sums, tokens), (others, _) = block_sums(ours, true), block_sums(theirs, true)
        falls = paired_bootstrap(Metric(mean_nll), sums, others, tokens, groups=drawn, seed=seed)
        difference = perplexity_of(others, tokens) / perplexity_of(sums, tokens) - 1
        found = Interval(*(None if end is None else float(np.expm1(-end)) for end in (falls.high, falls.low)))
    else:
        difference = metric.drop(metric.of(ours, true), metric.of(theirs, true))
        found = paired_bootstrap(metric, ours, theirs, true, groups=drawn, seed=seed)
    change = Drop(difference=difference, low=found.low, high=found.high, groups=len(drawn), n=labels.count(), **changes)
    return _explained(change, drawn)


def _changes(before: tuple[Array, Array] | None, after: tuple[Array, Array] | None) -> tuple[dict[str, int | None], tuple[int, int]]:
    """Returns the three numbers of changes of `paired`, and the first two again; zeros where there are no classes."""
    if before is None or after is None:
        return dict.fromkeys(("right_to_wrong", "wrong_to_right", "changed")), (0, 0)
    (first, true), (second, _) = before, after
    lost, gained = int(np.sum((first == true) & (second != true))), int(np.sum((first != true) & (second == true)))
    return {"right_to_wrong": lost, "wrong_to_right": gained, "changed": int(np.sum(first != second))}, (lost, gained)


def _bounds(metric: Metric) -> Bounds:
    return "share" if metric.is_share else "correlation" if metric.is_correlation else "none"


def _explained(figure: Explained, groups: Groups) -> Explained:
    """Returns a figure with the reason why it has no interval."""
    return figure if figure.low is not None else figure.with_(interval_reason=resampling.no_interval(groups))


def _groups(groups: Groups | None, rows: int) -> Groups:
    if groups is not None and len(groups.numbers) != rows:
        raise ValueError(f"{len(groups.numbers)} numbers of groups for {rows} values; as many are needed")
    return each_alone(rows) if groups is None else groups


def _rows(labels: Array, *predictions: Array) -> int:
    lengths = {len(labels), *(len(prediction) for prediction in predictions)}
    if len(lengths) != 1 or not len(labels):
        raise ValueError(
            f"labels {labels.shape}, predictions {[p.shape for p in predictions]}: all need the same number of rows, at least 1"
        )
    return len(labels)
