"""The table of metrics, and the differences between the predictions of two models.

To add a metric, write its function here, add a row to `METRICS`, and name it in the row of a task (`foundation.labels.tasks`). Metrics that
only one form of labels has are in its class instead (`foundation.labels.form`). The first metric of a task is the primary one, which
goals refer to. Intervals of a new metric are bootstrapped (`compress.report.intervals`).

The standard metrics of each task, implemented in numpy (tests compare them with scikit-learn and SciPy):

    accuracy  = mean(argmax(logits) == y)                                            ties go to the lowest class
    top_5     = mean(y is among the five largest logits)                             where there are more than five classes
    f1        = 2 tp / (2 tp + fp + fn)        two classes: of class 1; more: mean over the classes that occur in predictions or labels
    matthews  = (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2)(s^2 - sum_k t_k^2))  c correct, s rows, p_k predicted, t_k true counts
    pearson   = cov(x, y) / (sd(x) sd(y));  spearman = pearson of the ranks, ties share their average rank
    micro_f1, macro_f1 and exact_match of sets of labels: `foundation.labels.label_sets`
    entity_f1, entity_precision and entity_recall of entities in texts: `foundation.labels.tags`
    answer_f1 and answer_exact_match of answers to questions, and F1 of those that have one and that have none:
    `foundation.labels.spans` wer and cer, errors of words and characters in texts that are spoken: `foundation.labels.transcripts`
    perplexity and accuracy of the next token: `foundation.labels.next_token`
    ndcg@10, mrr@10 and recall@100 of documents that are searched: `foundation.labels.ranking`
    recall@1, @5 and @10 of images by their captions, and of captions by their images: `foundation.labels.captions`

An undefined metric (0 / 0: constant predictions have no correlation) is 0, so that it never looks good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from foundation.core import correlation
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.labels import label_sets, next_token, tags, transcripts
from foundation.labels.captions import Captions
from foundation.labels.form import Figure, Labels
from foundation.labels.relevance import Judged
from foundation.labels.tasks import TASKS, Task

TOP = 5
"""Classes that `top_5` looks at."""


class Made(NamedTuple):
    """What a share is made of."""

    rows: Array
    """Rows that it depends on, bool `[n]`."""
    is_f1: bool = False
    """Whether it is 2 J / (1 + J) of the share J of these rows that are right, and not J itself."""


def of_all_rows(answers: Array, labels: Array) -> Made:
    """Returns all rows `[n, ...]`."""
    return Made(np.ones(len(answers), dtype=bool))


@dataclass(frozen=True)
class Metric:
    """A metric, and how to format and compare it."""

    of: Figure
    """Function of what `foundation.labels.form.Labels.values` returns."""
    higher_is_better: bool = True
    """Whether a higher value is better."""
    relative: bool = False
    """Whether a drop is relative to the value before and not a difference."""
    defined: Callable[[Array], bool] = lambda answers: True
    """Whether predictions, as `Labels.values` returns them, have this metric; else it is left out."""
    is_share: bool = False
    """Whether it is a share of the predictions, written in percent with differences in points."""
    made_of: Callable[[Array, Array], Made] = of_all_rows
    """What a share of predictions and labels is made of: by it a share of 0 or 1 gets an interval (`compress.report.intervals`)."""
    is_correlation: bool = False
    """Whether it is a correlation, in -1..1."""
    constants: bool = True
    """Whether a model that gives every row the same answer is a floor of it (`foundation.measure.chance`)."""

    def drop(self, before: float, after: float) -> float:
        """Returns the loss, positive if the metric got worse: the difference, or after / before - 1 for a relative metric."""
        if self.relative:
            return (after / before - 1) * (-1 if self.higher_is_better else 1)
        return before - after if self.higher_is_better else after - before


def metrics(task: Task, logits: Array, labels: Labels) -> dict[str, float]:
    """Returns the metrics of a task by name, the primary one first.

    Args:
        task: The task; its row names the metrics.
        logits: Float `[n, C]`; `[n, 1]` for regression; for generation `[n, T, 2]`, see `foundation.labels.next_token`; vectors `[n,
        D]`.
        labels: Their labels.

    Raises:
        InputError: There are no rows.
    """
    if not len(labels):
        raise InputError("data", "no row to evaluate", remedy="give at least one labelled row")
    assert len(logits) == len(labels), (logits.shape, len(labels))
    values, true = labels.values(logits)
    return {name: metric_of(task, name).of(values, true) for name in TASKS[task].metrics if METRICS[name].defined(values)}


def metric_of(task: Task, name: str) -> Metric:
    """Returns a metric as the answers of a task have it: a row of `METRICS`."""
    own = TASKS[task].answer.FIGURES.get(name)
    return METRICS[name] if own is None else replace(METRICS[name], of=own)


def primary(task: Task) -> Metric:
    """Returns the primary metric of a task, used by goals and report."""
    return metric_of(task, TASKS[task].metric)


def accuracy(answers: Array, labels: Array) -> float:
    """Returns the share of rows `[n, C]` whose largest logit (ties: the lowest) is the label: of images whose nearest class is theirs,
    of triplets whose positive is nearer than their negative."""
    return float(np.mean(answers.argmax(axis=1) == labels))


def top_5(answers: Array, labels: Array) -> float:
    """Returns the share of rows `[n, C]` whose label is among the five largest logits; of equal logits the label's counts last."""
    own = np.take_along_axis(answers, labels[:, None], axis=1)
    return float(np.mean((answers >= own).sum(axis=1) <= TOP))


def f1(logits: Array, labels: Array) -> float:
    """Returns F1 of class 1 for two classes, else the unweighted mean over the classes that occur in predictions or labels."""
    answers = logits.argmax(axis=1)
    if logits.shape[1] == 2:
        return _f1_of(answers == 1, labels == 1)
    return float(np.mean([_f1_of(answers == k, labels == k) for k in np.union1d(answers, labels)]))


def _rows_of_f1(logits: Array, labels: Array) -> Made:
    """Rows that have class 1, or are found to; with more classes all rows, each of which has one."""
    if logits.shape[1] != 2:
        return of_all_rows(logits, labels)
    return Made((logits.argmax(axis=1) == 1) | (labels == 1), is_f1=True)


def matthews(logits: Array, labels: Array) -> float:
    """Returns the Matthews correlation coefficient of any number of classes (Gorodkin 2004)."""
    answers = logits.argmax(axis=1)
    num_classes = int(max(answers.max(), labels.max())) + 1
    answered = np.bincount(answers, minlength=num_classes).astype(np.float64)
    true = np.bincount(labels, minlength=num_classes).astype(np.float64)
    rows, correct = float(len(labels)), float(np.sum(answers == labels))
    spread = (rows**2 - float(answered @ answered)) * (rows**2 - float(true @ true))
    return _ratio(correct * rows - float(answered @ true), math.sqrt(spread))


def pearson(x: Array, y: Array) -> float:
    """Returns the linear correlation of two arrays of n numbers, `[n]` or `[n, 1]`, in float64; 0 if either is constant."""
    return correlation.pearson(x, y)


def spearman(x: Array, y: Array) -> float:
    """Returns the rank correlation of two arrays of n numbers, `[n]` or `[n, 1]`."""
    return correlation.spearman(x, y)


def _of_sets(figure: Figure) -> Figure:
    """Returns a figure of two sets as one of logits `[n, C]` and labels bool `[n, C]`."""
    return lambda logits, true: figure(logits > 0, true)


def _rows_with_labels(logits: Array, true: Array) -> Made:
    return Made(np.asarray(((logits > 0) | true).any(axis=1)), is_f1=True)


def _rows_with_entities(counts: Array, _: Array) -> Made:
    return Made((counts[:, 1] > 0) | (counts[:, 2] > 0), is_f1=True)


def _of_questions(column: int, answerable: bool | None = None) -> Figure:
    """Returns the mean of a column of the figures of questions, or of those that have an answer, or that have none."""

    def figure(figures: Array, _: Array) -> float:
        chosen = figures if answerable is None else figures[figures[:, 2] == answerable]
        return float(chosen[:, column].mean()) if len(chosen) else 0.0

    return figure


def _of_answerable(answerable: bool) -> Callable[[Array, Array], Made]:
    return lambda figures, _: Made(figures[:, 2] == answerable)


def _of_both_kinds(answers: Array) -> bool:
    """Whether some questions have an answer and some have none."""
    return len(np.unique(answers[:, 2])) == 2


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(accuracy, is_share=True),
    "top_5": Metric(top_5, is_share=True, defined=lambda answers: answers.shape[1] > TOP),
    "f1": Metric(f1, is_share=True, made_of=_rows_of_f1),
    "matthews": Metric(matthews, is_correlation=True),
    "micro_f1": Metric(_of_sets(label_sets.micro_f1), is_share=True, made_of=_rows_with_labels),
    "macro_f1": Metric(_of_sets(label_sets.macro_f1), is_share=True),
    "exact_match": Metric(_of_sets(label_sets.exact_match), is_share=True),
    "entity_f1": Metric(lambda counts, _: tags.f1(counts), is_share=True, made_of=_rows_with_entities),
    "entity_precision": Metric(lambda counts, _: tags.precision(counts), is_share=True, made_of=lambda counts, _: Made(counts[:, 1] > 0)),
    "entity_recall": Metric(lambda counts, _: tags.recall(counts), is_share=True, made_of=lambda counts, _: Made(counts[:, 2] > 0)),
    "answer_f1": Metric(_of_questions(1), is_share=True),
    "answer_exact_match": Metric(_of_questions(0), is_share=True),
    "has_answer_f1": Metric(_of_questions(1, True), is_share=True, made_of=_of_answerable(True), defined=_of_both_kinds),
    "no_answer_f1": Metric(_of_questions(1, False), is_share=True, made_of=_of_answerable(False), defined=_of_both_kinds),
    "wer": Metric(lambda errors, _: transcripts.rate(errors, 0), higher_is_better=False, is_share=True),
    "cer": Metric(lambda errors, _: transcripts.rate(errors, 2), higher_is_better=False, is_share=True),
    "pearson": Metric(pearson, is_correlation=True),
    "spearman": Metric(spearman, is_correlation=True),
    "perplexity": Metric(next_token.perplexity, higher_is_better=False, relative=True),
    **{name: Metric(of, is_share=form.ARE_SHARES) for form in (Captions, Judged) for name, of in form.METRICS.items()},
}


def _f1_of(answered: Array, true: Array) -> float:
    hits = float(np.sum(answered & true))
    return _ratio(2 * hits, float(np.sum(answered) + np.sum(true)))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
