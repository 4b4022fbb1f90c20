"""Runs the short trainings of a budget and reads their losses.

Every training is an ordinary run, judged on selection rows: it resumes after a kill, and a finished one is found. All of them share one
store of artifacts, so that the stages before are run once.

    1 - metric     of metrics whose best value is 1, such as accuracy; other metrics, which are better the lower, are losses themselves
    cross entropy  -log p[y], mean over the rows, p = softmax(z / T) with the temperature T that makes it least (Guo et al. 2017,
                   https://arxiv.org/abs/1706.04599): a small model that has read its rows often is right, but too sure of itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.budget.law import Array, Trainings
from compress.budget.setting import Setting, Studied
from compress.pipeline import run
from foundation.artifacts.run_folder import open_run
from foundation.artifacts.store import share
from foundation.core.progress import ConsoleProgress
from foundation.core.resampling import Groups, each_alone
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.measure.answers import load_groups, load_predictions
from foundation.measure.chance import chance
from foundation.measure.judged import Judged

TRIALS = "trials"
RESAMPLES = 200
"""Draws of the selection rows."""
LEAST_ROWS = 0.5
"""Rows that a model with no error counts as getting wrong: its loss has a logarithm then."""


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of a trained model on the selection rows."""

    setting: Setting
    parameters: int
    """Parameters of the model."""
    seconds: float
    """What the training took."""
    logits: NDArray[np.float32]
    """As predictions have them, [n, ...]."""
    labels: Labels
    groups: Groups


def trained(studied: Studied, setting: Setting, folder: Path, progress: ConsoleProgress) -> Answers:
    """Trains one setting, or finds it finished.

    Args:
        studied: The training.
        setting: Its setting.
        folder: Folder of the budget.
        progress: Progress of the training.

    Raises:
        InputError: The recipe, the data or the model does not allow it.
    """
    place = folder / TRIALS / setting.name
    share(place, folder)
    run(studied.recipe_of(setting), place, progress=progress, judge="selection")
    finished = open_run(place)
    name, made = list(finished.variants.items())[-1]
    file = finished.predictions(name)
    logits, labels = load_predictions(file, studied.recipe.model.task)
    found = load_groups(file)
    groups = each_alone(len(labels.values(logits)[1])) if found is None else Groups(found)
    evaluated = next(artifact for artifact in finished.artifacts.values() if artifact.path == file.parent)
    return Answers(setting, int(evaluated.metrics["parameters"]), float(made.manifest["seconds"]), logits, labels, groups)


def loss_of(judged: Judged, value: float) -> float:
    """Returns the loss of a metric: what it lacks to 1, of metrics that are better the lower their value."""
    return 1 - value if judged.metric.higher_is_better else float(np.log(value)) if judged.metric.relative else value


def metric_of(judged: Judged, loss: Array) -> Array:
    """Returns the values of a metric with these losses, the inverse of `loss_of`."""
    return 1 - loss if judged.metric.higher_is_better else np.exp(loss) if judged.metric.relative else loss


def metric_losses(judged: Judged, answers: Sequence[Answers], seed: int = 0) -> Trainings:
    """Returns settings and losses of the metric.

    Args:
        judged: The metric.
        answers: Of each training, on the same rows.
        seed: Seed of the draws of rows.
    """
    first = answers[0]
    values = [one.labels.values(one.logits) for one in answers]

    def losses(rows: NDArray[np.int64]) -> Array:
        return np.array([loss_of(judged, judged.metric.of(own[rows], true[rows])) for own, true in values])

    least = LEAST_ROWS / len(first.groups.numbers)
    floor = loss_of(judged, chance(judged.metric, first.logits, first.labels)) if judged.metric.higher_is_better else None
    return _trainings(answers, losses, first.groups, least, floor, seed)


def entropy_losses(answers: Sequence[Answers], seed: int = 0) -> Trainings | None:
    """Returns settings and calibrated cross entropies; None where rows have no classes."""
    first = answers[0]
    if not isinstance(first.labels, ClassIds):
        return None
    true = first.labels.array
    each_IN = np.stack([_entropies(one.logits.astype(np.float64), true) for one in answers])
    shares = np.bincount(true) / len(true)
    floor = float(-np.sum(shares[shares > 0] * np.log(shares[shares > 0])))
    return _trainings(answers, lambda rows: each_IN[:, rows].mean(axis=1), first.groups, LEAST_ROWS / len(true), floor, seed)


def _entropies(logits: Array, true: NDArray[np.int64]) -> Array:
    """Returns the cross entropy of each row at the best temperature, [n].

    Args:
        logits: [n, C].
        true: Class ids, [n].
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    def of(log_temperature: float) -> Array:
        return np.asarray(-log_softmax(logits / np.exp(log_temperature), axis=1)[np.arange(len(true)), true])

    best = minimize_scalar(lambda value: float(of(value).mean()), bounds=(-4.0, 6.0), method="bounded")
    return of(float(best.x))


def _trainings(
    answers: Sequence[Answers],
    losses: Callable[[NDArray[np.int64]], Array],
    groups: Groups,
    least: float,
    floor: float | None,
    seed: int,
) -> Trainings:
    """Returns the losses with their variance: of draws of the rows, less what all trainings have in common.

    Args:
        answers: Of each training.
        losses: Maps row numbers to the losses of all trainings.
        groups: The groups of the rows.
        least: What a loss counts as at least.
        floor: Loss of a model that has learned nothing; rows of a single class have none, as it would be 0.
        seed: Seed of the draws.
    """
    random, count = np.random.default_rng([seed, 2]), len(groups)
    every = losses(groups.rows(np.arange(count)))
    drawn = [losses(groups.rows(random.integers(0, count, count))) for _ in range(RESAMPLES)]
    logs_RN = np.log(np.maximum(np.stack(drawn), least))
    own_RN = logs_RN - logs_RN.mean(axis=1, keepdims=True)
    variance = own_RN.var(axis=0) * len(answers) / (len(answers) - 1)
    settings = np.array([(one.setting.rows, one.setting.epochs, size_of(one)) for one in answers], np.float64)
    return Trainings(settings, np.maximum(every, least), variance, floor if floor and floor > least else None)


def size_of(answers: Answers) -> float:
    """Returns the size of a model in the law: its layers, which the parameters outside of the embeddings grow with."""
    return float(answers.setting.layers or 1)
