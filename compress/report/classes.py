"""Figures of every class: how well a model separates them, and whether it does better than always the most frequent one.

    precision = right / found      recall = right / true      f1 = 2 right / (found + true)

found: rows (entities) predicted as the class; true: rows labelled with it; right: both. An undefined figure (0 / 0) is None.
"""

from __future__ import annotations

from collections.abc import Sequence

from compress.report import goals, phrases
from compress.report.evaluations import Evaluation, class_names
from compress.report.model.contents import Classes, ClassFigures, ClassRow, Contents, Majority, Served
from compress.report.served import predictions_of
from foundation.artifacts.figures import Accuracy
from foundation.artifacts.run_folder import Run
from foundation.core.arrays import Array
from foundation.core.engines import REFERENCE
from foundation.measure.answers import load_predictions
from foundation.measure.judged import OF_CLASS


def classes(run: Run, reference: Evaluation, served: Served | None) -> Classes | None:
    """Returns the block `classes` of report.json; None where answers are no classes.

    Args:
        run: A finished run.
        reference: The baseline in torch.
        served: The block `served`.
    """
    labels = reference.labels
    before = labels.class_counts(reference.logits)
    if before is None:
        return None
    backend, after = _served(run, served)
    names = _names(run, reference, len(before))
    rows = [
        ClassRow(
            name=names[number],
            n=int(before[number, 2]),
            baseline=_figures(before[number]),
            served=None if after is None else _figures(after[number]),
        )
        for number in range(len(before))
        if before[number].any() or (after is not None and after[number].any())
    ]
    majority = _majority(before[:, 2], names) if labels.ONE_CLASS and len(labels) else None
    return Classes(backend=backend, majority=majority, rows=rows)


def _served(run: Run, served: Served | None) -> tuple[str | None, Array | None]:
    """Returns the last backend of what is served, and its counts."""
    files = {} if served is None else predictions_of(run, served.names)
    if not files:
        return None, None
    backend, file = list(files.items())[-1]
    logits, labels = load_predictions(file, run.recipe["model"]["task"])
    return backend, labels.class_counts(logits)


def _figures(count: Array) -> ClassFigures:
    counts_of_class = [float(part) for part in count]
    parts = {name: OF_CLASS[name](*counts_of_class) for name in ("precision", "recall", "f1")}
    return ClassFigures(**{name: numerator / divisor if divisor else None for name, (numerator, divisor) in parts.items()})


def _names(run: Run, reference: Evaluation, size: int) -> list[str]:
    """Returns the class names of the checkpoint, or the kinds of its tags; numbers if it has no names."""
    known = class_names(run)
    names = [known.get(number, str(number)) for number in range(max(size, len(known)))]
    names = [*reference.labels.class_names(names)] if known else names
    return names if len(names) >= size else [str(number) for number in range(size)]


def _majority(true: Array, names: Sequence[str]) -> Majority:
    """Returns the most frequent class and its share of the rows, given how many rows have each, int64 `[C]`."""
    return Majority(name=names[int(true.argmax())], share=float(true.max() / true.sum()))


def no_better(report: Contents) -> str | None:
    """Returns a warning that names every variant that is no better than a model that knows nothing (`metric.chance`); None without one."""
    metric, chance = report.metric.name, report.metric.chance
    values = [(variant.id, variant.accuracy.get(REFERENCE, Accuracy()).value) for variant in report.variants]
    found = [f"{name} {phrases.figure(value, metric)}" for name, value in values if goals.knows_nothing(value, report)]
    if not found:
        return None
    cause = "train longer, check labels and columns, or judge another metric"
    majority = None if report.classes is None else report.classes.majority
    always = f"always the most frequent class, {majority.name}, or an answer" if majority else "an answer"
    ignorant = "its answers in another order" if phrases.is_recall(metric) else f"{always} that does not depend on the row"
    return (
        f"no better than a model that knows nothing: {metric} of {', '.join(found)} in torch, against {phrases.figure(chance, metric)} for "
        f"{ignorant}: {cause}"
    ).replace(phrases.SPACE, " ")
