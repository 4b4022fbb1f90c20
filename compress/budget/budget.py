"""`compress plan --budget`: how long to train.

budgets/<name>/
  budget.json         settings, losses, laws and the table
  trials/SETTING/     the run of each short training, judged on selection rows
  stages/             the store: artifacts of all of these, each made once

The recipe's own training and its alternatives are predicted by the law (`compress.budget.law`), the hours by earlier runs on this machine,
to which the short trainings belong (`compress.forecast`). A gain is the difference between two trainings on the same selection rows, each
with the noise of its seed: 90 % of such differences are in its interval. Where it holds 0 the alternative may turn out no better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compress.budget.law import Array, Fit, Trainings, fit
from compress.budget.setting import Alternative, Setting, Studied, cost, studied_stage
from compress.budget.trainings import Answers, entropy_losses, metric_losses, metric_of, trained
from compress.forecast import predicted
from compress.recipe import Recipe, untracked
from compress.run import durations
from compress.run.pace import seconds_of_one
from compress.run.prepare import checked_with, context_of, prepare
from compress.run.speed import speed
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import num_classes
from foundation.measure.judged import Judged, judged_of
from foundation.models.importing import check_model
from foundation.models.inputs.tokenizer import resolve_tokenizer
from foundation.models.library import depths_of
from foundation.stage.context import Context

MARK = ".budget"
COVERAGE = 0.9
"""Share of trainings within their intervals."""
LEARNED = 0.9
"""Share of the loss of chance below which a training has learned something."""


@dataclass(frozen=True)
class Prediction:
    """What a setting is expected to reach."""

    alternative: Alternative
    metric: float
    metric_interval: tuple[float, float]
    gain: float
    """By how much the metric is better than with the recipe, in the unit of the metric; negative: worse."""
    gain_interval: tuple[float, float]
    loss: float | None
    """Calibrated cross entropy; None where rows have no classes."""
    loss_interval: tuple[float, float] | None
    seconds: float
    """Of the training on this machine."""
    cheaper: bool
    """Whether it takes less than the recipe."""

    @property
    def verdict(self) -> str:
        """What the gain says."""
        low, high = self.gain_interval
        if self.alternative.name == "the recipe":
            return ""
        if low > 0:
            return "better"
        if high < 0:
            return "worse"
        return "saves time: as good within the interval" if self.cheaper else "not worth it: the interval holds 0"


@dataclass(frozen=True, eq=False)
class Budget:
    """The result of a study."""

    studied: Studied
    judged: Judged
    folder: Path
    answers: tuple[Answers, ...]
    """Of the short trainings."""
    metric: Trainings
    metric_fit: Fit
    entropy: Trainings | None
    entropy_fit: Fit | None
    predictions: tuple[Prediction, ...]

    def predict(self, settings: Sequence[Setting]) -> tuple[Array, Array]:
        """Returns the expected metric of settings, [M], and the interval of a training with each, [M, 2]."""
        drawn = metric_of(self.judged, self.metric_fit.drawn(vectors(settings)))
        return metric_of(self.judged, self.metric_fit.law.loss(vectors(settings))), ends(drawn)


def study(recipe: Recipe, out: Path | None = None, progress: ConsoleProgress | None = None) -> Budget:
    """Runs the short trainings that are missing, fits the laws, and predicts what alternatives to a recipe are worth.

    Args:
        recipe: A checked recipe with a finetune or distill stage.
        out: The folder; default `budgets/<name>`.
        progress: Where progress is shown; default: the terminal.

    Raises:
        InputError: The recipe, the data, the model or the machine does not allow it.
    """
    recipe, folder = untracked(recipe), local(out or Path("budgets") / recipe.name, "--budget")
    progress = progress or ConsoleProgress()
    studied_stage(recipe)  # before the data, which may take long to load
    with progress.alive("reading data and model"):
        context = prepare(recipe, folder, ConsoleProgress("silent"), judge="selection")
        context.count_macs()
        studied = Studied.of(recipe, len(context.data.train), _depth(recipe, context))
        settings = studied.short()
        for setting in settings:
            _context(studied, setting, context, folder).count_macs()
    open_folder(folder)
    progress.log(f"budget: {len(settings)} short trainings of {settings[0].rows:,} to {studied.most_rows:,} rows in {folder}")
    answers = []
    for number, setting in enumerate(settings, 1):
        progress.log(f"  {number} of {len(settings)}: {setting.name}")
        with progress.alive(setting.name):
            answers.append(trained(studied, setting, folder, ConsoleProgress("silent")))
    judged = judged_of(recipe.model.task, recipe.goals.metric, context.data.labels)
    return concluded(studied, judged, folder, answers, lambda setting: seconds_of(studied, setting, context, folder), recipe.seed)


def concluded(
    studied: Studied, judged: Judged, folder: Path, answers: Sequence[Answers], seconds: Callable[[Setting], float], seed: int
) -> Budget:
    """Fits the laws to finished trainings, and predicts the alternatives.

    Args:
        studied: The training.
        judged: The metric.
        folder: The folder of the budget.
        answers: Of the short trainings.
        seconds: Predicts the time of a setting.
        seed: Seed of the draws.

    Raises:
        InputError: Most of the trainings have learned nothing.
    """
    metric, entropy = metric_losses(judged, answers, seed), entropy_losses(answers, seed)
    check_learned(metric, studied)
    metric_fit = fit(metric, seed=seed)
    entropy_fit = None if entropy is None else fit(entropy, seed=seed)
    alternatives = studied.alternatives()
    points = vectors([one.setting for one in alternatives])
    losses, drawn = metric_fit.law.loss(points), metric_fit.drawn(points, seed)
    values, intervals = metric_of(judged, losses), ends(metric_of(judged, drawn))
    gains, gain_intervals = losses[0] - losses, ends(drawn[:, :1] - drawn)
    entropies = None if entropy_fit is None else entropy_fit.law.loss(points)
    entropy_ends = None if entropy_fit is None else ends(entropy_fit.drawn(points, seed))
    found = []
    for index, one in enumerate(alternatives):
        found.append(
            Prediction(
                one,
                float(values[index]),
                _pair(intervals[index]),
                float(gains[index]),
                _pair(gain_intervals[index]),
                None if entropies is None else float(entropies[index]),
                None if entropy_ends is None else _pair(entropy_ends[index]),
                seconds(one.setting),
                cost(one.setting) < cost(alternatives[0].setting),
            )
        )
    return Budget(studied, judged, folder, tuple(answers), metric, metric_fit, entropy, entropy_fit, tuple(found))


def check_learned(metric: Trainings, studied: Studied) -> None:
    """Checks that the trainings show a slope: losses at chance say nothing of where a longer training leads.

    Args:
        metric: Losses of the short trainings.
        studied: What is trained.

    Raises:
        InputError: Fewer than half of them are better than chance.
    """
    if metric.chance is None:
        return
    learned = int(np.sum(metric.loss < LEARNED * metric.chance))
    if 2 * learned < len(metric.loss):
        given = f"{len(metric.loss) - learned} of {len(metric.loss)} short trainings of {studied.stage.key} are no better than chance"
        remedy = "give a higher learning_rate, smaller batches or more rows, or start from a trained model"
        raise InputError("--budget", given, "no law follows from them", remedy)


def vectors(settings: Sequence[Setting]) -> Array:
    """Returns settings as the law has them: rows, epochs and layers, float64 [M, 3]."""
    return np.array([(one.rows, one.epochs, one.layers or 1) for one in settings], np.float64)


def ends(drawn: Array) -> Array:
    """Returns the ends of the interval of draws, float64 [K, M], as [M, 2]."""
    return np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0).T


def _pair(interval: Array) -> tuple[float, float]:
    return float(interval[0]), float(interval[1])


def open_folder(folder: Path) -> None:
    """Creates the folder of a budget.

    Raises:
        InputError: There is something else.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MARK).is_file())):
        raise InputError(f"{folder}", "not empty and no folder of a budget", remedy="move it, or give the recipe another name")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def seconds_of(studied: Studied, setting: Setting, context: Context, folder: Path) -> float:
    """Returns the predicted time of the training of a setting on this machine; rows that are missing count as further epochs.

    Args:
        studied: The training.
        setting: Its setting.
        context: The context of the recipe.
        folder: The folder of the budget.
    """
    rows = min(setting.rows, studied.train_rows)
    held = replace(setting, rows=rows, epochs=setting.epochs * setting.rows / rows)
    planned = predicted(studied.recipe_of(held), _context(studied, held, context, folder))
    entry = next(one for one in planned if one.step.id == studied.stage.id)
    known = speed(context.target.num_threads)
    return durations.predict(entry.step.NAME, entry.parts, seconds_of_one(entry.step.NAME, known)).seconds


def _context(studied: Studied, setting: Setting, context: Context, folder: Path) -> Context:
    return context_of(studied.recipe_of(setting), context.data, folder, ConsoleProgress("silent"))


def _depth(recipe: Recipe, context: Context) -> int:
    """Returns the layers of the model that the student is made of; of several stacks those of the smallest."""
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    labels = num_classes(context.task, context.data.labels)
    config = check_model(recipe.model, labels, context.max_length, tokenizer).config
    stage = studied_stage(recipe)
    given = next(config for one, config, _ in checked_with(recipe, config, context) if one.id == stage.id)
    return min(depths_of(given) or (1,))
