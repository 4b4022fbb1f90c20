"""What a model answers on a split, and how good that is.

The figures are the usual ones of these tasks, written out in numpy (tests compare them with scikit-learn and SciPy):

    accuracy  = mean(argmax(logits) == y)                                            ties take the lowest class
    f1        = 2 tp / (2 tp + fp + fn)        two classes: of class 1; more: mean over the classes that occur in answers or labels
    matthews  = (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2)(s^2 - sum_k t_k^2))  c correct, s rows, p_k answered, t_k true counts
    pearson   = cov(x, y) / (sd(x) sd(y));  spearman = pearson of the ranks, ties share their average rank
    perplexity and accuracy of the next token: `compress.core.next_token`

A figure without a meaning (0 / 0: a constant answer has no correlation) is 0, so that it can never look good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from compress.core import next_token
from compress.core.errors import InputError
from compress.core.progress import Progress
from compress.core.tasks import TASKS, Task, facts
from compress.machine.process import freed_memory_returned
from compress.models.config import read_config
from compress.models.streaming import StreamedModel, is_large, meta_model, structure_problem
from compress.schemes.checkpoint import QUANTIZATION_JSON
from compress.schemes.sites import load_sites
from compress.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from torch import nn

    from compress.standalone.preprocess import Preprocessor

Array = NDArray[Any]
STEP = 16
PRIMARY: dict[Task, str] = {task: row.metric for task, row in TASKS.items()}
"""The metric that goals and the report are about."""


def metrics(task: Task, logits: Array, labels: Array) -> dict[str, float]:
    """Returns the figures of a task, each as a fraction; perplexity is what it is.

    Args:
        task: Decides which figures.
        logits: Float `[n, C]`; `[n, 1]` for regression; for generation the answers `[n, T, 2]` of `compress.core.next_token`.
        labels: Class ids `[n]`, values `[n]` for regression, or ids of the next tokens `[n, T]`.

    Raises:
        InputError: There are no rows.
    """
    if not len(labels):
        raise InputError("data: no row to evaluate; at least one labelled row is needed")
    assert len(logits) == len(labels), (logits.shape, labels.shape)
    if TASKS[task].answer == "tokens":
        return {"perplexity": next_token.perplexity(logits, labels), "accuracy": next_token.accuracy(logits, labels)}
    if TASKS[task].answer == "value":
        values = logits.reshape(len(labels))
        return {"pearson": pearson(values, labels), "spearman": spearman(values, labels)}
    answers = logits.argmax(axis=1)
    accuracy = float(np.mean(answers == labels))
    if task == "image-classification":
        return {"accuracy": accuracy}
    return {"accuracy": accuracy, "f1": f1(answers, labels, logits.shape[1]), "matthews": matthews(answers, labels)}


def f1(answers: Array, labels: Array, num_classes: int) -> float:
    """Returns F1 of class 1 for two classes, else the unweighted mean over the classes that occur in `answers` or `labels`."""
    if num_classes == 2:
        return _f1_of(answers == 1, labels == 1)
    return float(np.mean([_f1_of(answers == k, labels == k) for k in np.union1d(answers, labels)]))


def matthews(answers: Array, labels: Array) -> float:
    """Returns the Matthews correlation coefficient of any number of classes (Gorodkin 2004)."""
    num_classes = int(max(answers.max(), labels.max())) + 1
    answered = np.bincount(answers, minlength=num_classes).astype(np.float64)
    true = np.bincount(labels, minlength=num_classes).astype(np.float64)
    rows, correct = float(len(labels)), float(np.sum(answers == labels))
    spread = (rows**2 - float(answered @ answered)) * (rows**2 - float(true @ true))
    return _ratio(correct * rows - float(answered @ true), math.sqrt(spread))


def pearson(x: Array, y: Array) -> float:
    """Returns the linear correlation of two `[n]` arrays, in float64; 0 where either is constant."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # the mean of equal values may differ from them by a rounding
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.abs(x).max(), y / np.abs(y).max()  # squares of tiny or huge values would leave the range
    return min(1.0, max(-1.0, _ratio(float(x @ y), math.sqrt(float(x @ x) * float(y @ y)))))


def spearman(x: Array, y: Array) -> float:
    """Returns the rank correlation of two `[n]` arrays."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Array) -> Array:
    """Returns the ranks 1..n of an `[n]` array; equal values share the average of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Array = (last - (counts - 1) / 2)[inverse]
    return mean


def predict(model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Any], batch_size: int, progress: Progress | None = None) -> Array:
    """Returns what is `kept` of the logits of `rows`, in row order; every row is padded to its bucket, as engines and server do it.

    Raises:
        InputError: The model answers NaN or infinity; names the row.
    """
    found = logits_of(model, preprocessor, rows, batch_size, progress)
    return gathered(((indices, kept(preprocessor, [rows[index] for index in indices], logits)) for indices, logits in found), len(rows))


def gathered(found: Iterable[tuple[Sequence[int], Array]], count: int) -> Array:
    """Returns the answers to `count` rows, in row order, from batches of indices and answers `[b, ...]`.

    Raises:
        InputError: There are none, or an answer is NaN or infinite; names the row.
    """
    whole: Array | None = None
    for indices, answers in found:
        whole = np.zeros((count, *answers.shape[1:]), np.float32) if whole is None else whole
        whole[indices] = answers
    if whole is None:
        raise InputError("data: no row to predict; at least one row is needed")
    bad = not_finite(whole)
    if len(bad):
        raise InputError(f"model: the answer to {len(bad)} of {count} rows is NaN or infinite, first to row {bad[0]}; check its weights")
    return whole


def logits_of(
    model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Any], batch_size: int, progress: Progress | None = None
) -> Iterator[tuple[list[int], Array]]:
    """Yields the indices of the rows of a batch and their logits, float32 `[b, C]`, or `[b, L, V]` for generation; in evaluation mode."""
    import torch

    from compress.machine.parallel import without_gradients
    from compress.models.forward import device_of, forward

    device, was_training = device_of(model), model.training
    model.eval()
    with progress.bar("predict", len(rows)) if progress else nullcontext() as advance:
        for indices, features in preprocessor.batches(rows, batch_size):
            with without_gradients(model):
                logits = forward(model, {name: torch.from_numpy(value).to(device) for name, value in features.items()}).cpu().numpy()
            yield indices, logits
            if advance is not None:
                advance(len(indices))
    model.train(was_training)


def compared(model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Any], batch_size: int) -> Array:
    """Returns what `predict` does, for answers that are only compared: texts are padded `finely`."""
    return predict(model, finely(preprocessor), rows, batch_size)


def finely(preprocessor: Preprocessor) -> Preprocessor:
    """Returns one that pads texts to the next multiple of `STEP` tokens, not to the lengths that are served."""
    if facts(preprocessor.task).modality != "text":
        return preprocessor
    return replace(preprocessor, buckets=tuple(range(STEP, preprocessor.max_length, STEP)) + (preprocessor.max_length,))


def kept(preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
    """Returns what is kept of the logits of a batch, float32: all of them `[b, C]`, or for generation the answers `[b, T, 2]`."""
    if facts(preprocessor.task).answer == "tokens":
        return next_token.answers_of(rows, logits, preprocessor.max_length - 1)
    return logits


def not_finite(answers: Array) -> Array:
    """Returns the rows of `[n, ...]` that hold NaN or infinity, int64."""
    return np.flatnonzero(~np.isfinite(answers.reshape(len(answers), -1)).all(axis=1))


def num_predictions(labels: Array) -> int:
    """Returns how many predictions were judged: rows, or for generation tokens."""
    return int(np.sum(labels != next_token.IGNORED)) if labels.ndim == 2 else len(labels)


def differences(task: Task, reference: Array, answers: Array) -> tuple[Array, Array]:
    """Compares two sets of predictions for the same rows.

    Args:
        task: What was predicted.
        reference: Logits `[n, C]`, or for generation answers `[n, T, 2]`.
        answers: Of the same shape.

    Returns:
        Which predictions differ, bool `[N]`, rows or tokens (never for regression); and how far, float64 `[...]`: the absolute differences
        of all logits, or of the nll of every token.
    """
    if TASKS[task].answer == "tokens":
        before, after = next_token.choices(reference), next_token.choices(answers)
        predicted = before != next_token.NO_CHOICE
        return (before != after)[predicted], np.abs(answers[..., 0].astype(np.float64) - reference[..., 0])[predicted]
    distance = np.abs(answers.astype(np.float64) - reference)
    if TASKS[task].answer == "value":
        return np.zeros(len(reference), bool), distance
    return answers.argmax(axis=1) != reference.argmax(axis=1), distance


def save_predictions(path: Path, logits: Array, labels: Array) -> None:
    """Writes `logits` (float32 `[n, C]` or `[n, T, 2]`) and `labels` (int64 or float32 `[n]`, or int32 `[n, T]`) to a safetensors file."""
    from safetensors.numpy import save_file

    kind = np.float32 if np.issubdtype(labels.dtype, np.floating) else np.int32 if labels.ndim == 2 else np.int64
    save_file({"logits": np.ascontiguousarray(logits, np.float32), "labels": np.ascontiguousarray(labels, kind)}, path)


def load_predictions(path: Path) -> tuple[Array, Array]:
    """Returns (logits float32 `[n, ...]`, labels `[n, ...]`) of a file written by `save_predictions`."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return tensors["logits"], tensors["labels"]


def _f1_of(answered: Array, true: Array) -> float:
    hits = float(np.sum(answered & true))
    return _ratio(2 * hits, float(np.sum(answered) + np.sum(true)))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def predicts_streamed(folder: Path, task: Task) -> bool:
    """Whether `predict` takes the place of a model in memory: for a language model that is large and can be streamed."""
    if TASKS[task].answer != "tokens" or not is_large(folder) or structure_problem(meta_model(read_config(folder, "checkpoint"))[0]):
        return False
    return not ((folder / QUANTIZATION_JSON).exists() and load_sites(folder).names)


def predict_streamed(
    folder: Path, preprocessor: Preprocessor, rows: Sequence[Any], batch_size: int, scratch: Path, progress: Progress | None = None
) -> NDArray[Any]:
    """Does what `compress.evaluate.predict` does, for a checkpoint in its files; see there."""

    model = StreamedModel(folder)
    with freed_memory_returned(), torch.inference_mode():
        batches, _ = model.batches(preprocessor, rows, scratch, batch_size)
        order = range(len(model))
        for index in progress.track(order, "predict", len(model)) if progress else order:
            with model.layer(index) as layer:
                for batch in batches:
                    batch.hidden.copy_(model.run(index, layer, batch.inputs))
        answers = (
            (batch.indices, kept(preprocessor, [rows[i] for i in batch.indices], model.logits(batch.inputs).numpy())) for batch in batches
        )
        return gathered(answers, len(rows))
