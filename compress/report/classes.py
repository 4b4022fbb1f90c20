"""Figures of every class: how well a model separates them, and whether it does better than always the most frequent one.

    precision = right / found      recall = right / true      f1 = 2 right / (found + true)

found: rows (entities) predicted as the class; true: rows labelled with it; right: both. An undefined figure (0 / 0) is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compress.report import phrases
from compress.report.evaluations import Evaluation
from compress.report.model.contents import Contents
from compress.report.served import predictions_of
from foundation.artifacts import artifact
from foundation.artifacts.figures import Accuracy
from foundation.artifacts.run_folder import Run
from foundation.core.arrays import Array
from foundation.core.engines import REFERENCE
from foundation.core.forms import label_sets, tags, zero_shot
from foundation.measure.answers import load_predictions
from foundation.measure.judged import OF_CLASS, known_metric

CONFIG = "config.json"


def classes(run: Run, reference: Evaluation, served: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the block `classes` of report.json; empty where answers are no classes.

    Args:
        run: A finished run.
        reference: The baseline in torch.
        served: The block `served`.
    """
    before = counts(reference.logits, reference.labels)
    if before is None:
        return {}
    backend, after = _served(run, served)
    names = _names(run, reference, len(before))
    rows = [
        {
            "name": names[number],
            "n": int(before[number, 2]),
            "baseline": _figures(before[number]),
            "served": None if after is None else _figures(after[number]),
        }
        for number in range(len(before))
        if before[number].any() or (after is not None and after[number].any())
    ]
    return {"classes": {"backend": backend, "majority": _majority(reference, names), "rows": rows}}


def counts(logits: Array, labels: Array) -> Array | None:
    """Returns for each class how often it is right, found and true, int64 [C, 3]; None where answers are no classes.

    Args:
        logits: Answers of a model, in the form that their labels ask for.
        labels: Class ids, sets of labels, tags, or the classes of images (`foundation.core.forms`).
    """
    if tags.are_tags(labels):
        return tags.counts_of_kinds(logits, labels)
    if label_sets.are_sets(labels):
        found, true = logits > 0, labels.astype(bool)
        return np.stack([(found & true).sum(0), found.sum(0), true.sum(0)], axis=1).astype(np.int64)
    if zero_shot.are_images_and_texts(labels):
        rows = zero_shot.judged(labels)
        return _of_ids(zero_shot.with_answers(labels, logits)[rows, 1].astype(np.int64), labels[rows, 1].astype(np.int64), 0)
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        return _of_ids(logits.argmax(axis=1), labels, logits.shape[1])
    return None


def _of_ids(found: Array, true: Array, least: int) -> Array:
    """Returns the counts of class ids `[n]`, of at least so many classes."""
    size = max(least, int(max(found.max(initial=-1), true.max(initial=-1))) + 1)
    parts = (found[found == true], found, true)
    return np.stack([np.bincount(part, minlength=size) for part in parts], axis=1).astype(np.int64)


def _served(run: Run, served: Mapping[str, Any] | None) -> tuple[str | None, Array | None]:
    """Returns the last backend of what is served, and its counts."""
    files = {} if served is None else predictions_of(run, served)
    if not files:
        return None, None
    backend, file = list(files.items())[-1]
    return backend, counts(*load_predictions(file))


def _figures(count: Array) -> dict[str, float | None]:
    counts_of_class = [float(part) for part in count]
    parts = {name: OF_CLASS[name](*counts_of_class) for name in ("precision", "recall", "f1")}
    return {name: numerator / divisor if divisor else None for name, (numerator, divisor) in parts.items()}


def _names(run: Run, reference: Evaluation, size: int) -> list[str]:
    """Returns the class names of the checkpoint, or the kinds of its tags; numbers if it has no names."""
    file = run.artifacts[run.baseline].path / CONFIG
    known = (artifact.read_json(file).get("id2label") or {}) if file.is_file() else {}
    names = [str(known.get(str(number), number)) for number in range(max(size, len(known)))]
    if tags.are_tags(reference.labels):
        names = tags.kinds_of(names) if known else names
    return names if len(names) >= size else [str(number) for number in range(size)]


def _majority(reference: Evaluation, names: list[str]) -> dict[str, Any] | None:
    """Returns the most frequent class and its share of the rows; None where a row has any number of classes, or entities."""
    labels = reference.labels
    if tags.are_tags(labels) or label_sets.are_sets(labels) or not len(labels):
        return None
    ids = labels if labels.ndim == 1 else labels[zero_shot.judged(labels), 1]
    found = np.bincount(ids.astype(np.int64))
    return {"name": names[int(found.argmax())], "share": float(found.max() / found.sum())}


def no_better(report: Contents) -> str | None:
    """Returns a warning that names every variant that is no better than a model that knows nothing (`metric.chance`); None without one."""
    metric, chance = report.metric.name, report.metric.chance
    known = known_metric(metric)
    if chance is None or known is None:
        return None
    found = []
    for variant in report.variants:
        value = variant.accuracy.get(REFERENCE, Accuracy()).value
        if value is not None and (value <= chance if known.higher_is_better else value >= chance):
            found.append(f"{variant.id} {phrases.figure(value, metric)}")
    if not found:
        return None
    cause = "train longer, check labels and columns, or judge another metric"
    majority = None if report.classes is None else report.classes.majority
    always = f"always the most frequent class, {majority.name}, or an answer" if majority else "an answer"
    return (
        f"no better than a model that knows nothing: {metric} of {', '.join(found)} in torch, against {phrases.figure(chance, metric)} for "
        f"{always} that does not depend on the row: {cause}"
    ).replace(phrases.SPACE, " ")
