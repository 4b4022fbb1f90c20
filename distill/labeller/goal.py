"""The rows and soft targets of a student whose teacher is a labeller, and the checks of such a recipe.

    train rows and extra text   labelled, rows with little agreement left out   `labels`
    written texts               labelled, the others left out                   `written`
    selection rows              labelled too: the best weights agree most with these labels, unless labels of the data are read anyway

The labels of the train rows are not read (`hard_weight` 0). Only the first process asks the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.labeller.prompts import PromptFile, read_prompts
from distill.labeller.settings import Labeller
from distill.labeller.verbalizers import check_words
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds

if TYPE_CHECKING:
    from distill.labeller.answers import Answers
    from distill.labeller.scorer import Scorer
    from distill.labeller.written import Written
    from foundation.stage.context import Context


USUAL_TOKENS = 32
"""Tokens of a text with what its prompt adds, for a forecast."""


@dataclass(frozen=True)
class Goal:
    """What a student learns from a labeller."""

    split: Split
    """The training rows."""
    num_labelled: int
    """How many of them have labels of the data: these come first."""
    targets_nC: Array
    """Log-probabilities of the classes, float32 [n, C]."""
    selection_nC: Array
    """The same for the selection rows."""
    written: Written | None
    figures: dict[str, Any]
    """What is reported: JSON types."""


def prompts_of(labeller: Labeller, context: Context, key: str) -> PromptFile:
    """Returns the prompt file of a labeller.

    Raises:
        InputError: See `foundation.data.splits` for what rows are, and `read_prompts`.
    """
    pairs = isinstance(context.data.train.rows[0], tuple)
    return read_prompts(labeller.prompt, labeller.labels, pairs, f"{key}.prompt")


def check(labeller: Labeller, context: Context, key: str) -> None:
    """Checks, before the first stage runs, everything about a labeller that needs no weights and no server.

    Args:
        labeller: The labeller.
        context: Data and task.
        key: Key path of the labeller.

    Raises:
        InputError: The task, the labels, the prompt file or the model do not fit.
    """
    facts = context.facts
    if facts.modality != "text" or facts.two_towers or not isinstance(context.data.train.labels, ClassIds):
        raise InputError(key, f"a labeller given for {context.task}", "it labels texts with one class each", "give a model of the task")
    if context.aggregate:
        raise InputError("data.windows", f"given with a labeller in {key}", "it reads whole texts", "leave data.windows out")
    check_words(labeller.labels, context.data.labels, f"{key}.labels")
    file = prompts_of(labeller, context, key)
    if labeller.orders > 1 and len(file.examples) < 2:
        given = f"{labeller.orders} given, and {labeller.prompt} has {len(file.examples)} examples"
        raise InputError(f"{key}.orders", given, "orders need at least two", "add examples, or leave orders out")
    if labeller.write is not None and not file.write:
        raise InputError(f"{key}.write", f"given, and {labeller.prompt} has no `write`", remedy="add templates for texts, or leave it out")
    if labeller.write is not None and isinstance(context.data.train.rows[0], tuple):
        raise InputError(f"{key}.write", "given for pairs of texts", "single texts are written", "leave it out")
    if labeller.path is not None:
        from distill.labeller.causal import check_model
        from foundation.models.files import find

        check_model(find(labeller.path, f"{key}.path", weights=False), labeller.path, f"{key}.path")


def depends(labeller: Labeller, key: str) -> dict[str, object]:
    """Returns digests of the model and the prompt file: JSON types. Of a server only URL and name are known, which the recipe has."""
    from foundation.artifacts.artifact import file_digest
    from foundation.core.files import local

    found: dict[str, object] = {"prompt": file_digest(local(labeller.prompt, f"{key}.prompt"))}
    return found if labeller.path is None else {**found, "model": _digest(labeller.path, key)}


def work(labeller: Labeller, num_rows: int, key: str) -> float:
    """Returns about how many multiply-accumulates labels take: every parameter once for each token; 0 behind an API.

    Args:
        labeller: The labeller.
        num_rows: Rows to label, selection rows included.
        key: Key path of the labeller.
    """
    from foundation.artifacts.safetensors import headers
    from foundation.models.files import find

    if labeller.path is None:
        return 0.0
    parameters = sum(math.prod(shape) for shape, _ in headers(find(labeller.path, f"{key}.path"), f"{key}.path").values())
    return float(parameters) * USUAL_TOKENS * num_rows * labeller.orders


def _digest(path: str, key: str) -> str:
    from foundation.models.config import ModelConfig, read_config
    from foundation.models.files import find
    from foundation.models.importing import source_digest
    from foundation.models.library import task_of

    folder = find(path, f"{key}.path", weights=True)
    return source_digest(ModelConfig(path=str(folder), task=task_of(read_config(folder, f"{key}.path"), generates=True)))


def goal(labeller: Labeller, split: Split, num_labelled: int, context: Context, keys: tuple[str, str]) -> Goal:
    """Returns what a student learns from a labeller; in every process the same.

    Args:
        labeller: The labeller.
        split: Train rows, then unlabelled text.
        num_labelled: How many of them are train rows.
        context: Data, folders, processes and seed.
        keys: Id of the stage, and key path of the labeller.

    Raises:
        InputError: A row does not fit the model, no row is left, or the model fails.
    """
    return context.team.broadcast_object(_asked(labeller, split, num_labelled, context, keys) if context.team.is_first else None)  # type: ignore[return-value]


def _asked(labeller: Labeller, split: Split, num_labelled: int, context: Context, keys: tuple[str, str]) -> Goal:
    from distill.labeller.labels import Labels
    from distill.labeller.written import write

    stage, key = keys
    file = prompts_of(labeller, context, key)
    labels = Labels(labeller, file, context.data.labels, _answers(labeller, context, key), context.seed, stage)
    asked = labels.calibrate(split.rows, context.data.selection)
    found = labels.of(split.rows)
    chosen = np.flatnonzero(found.agreement_n >= labeller.min_agreement - 1e-6).tolist()
    if not chosen:
        given = f"{labeller.min_agreement:g} given, and no row has it"
        raise InputError(f"{key}.min_agreement", given, f"the largest is {found.agreement_n.max():g}", "give less")
    rows, targets_nC = split.take(chosen), found.log_p_nC[chosen]
    num_chosen = sum(index < num_labelled for index in chosen)
    figures: dict[str, Any] = {
        "variants": len(labels.variants),
        "agreement": float(found.agreement_n.mean()),
        "left_out": len(split) - len(chosen),
    }
    if labels.scaling is not None:
        figures["fit"] = {"scale": labels.scaling.scale, "offset": [*labels.scaling.offset]}
    written = None if labeller.write is None else write(labels, context.data.never_trained, split.rows, context.progress)
    if written is not None:
        rows = Split([*rows.rows, *written.rows], rows.labels.joined(rows.labels.blank(len(written.rows))))
        targets_nC = np.concatenate([targets_nC, written.log_p_nC])
        figures["written"] = written.counts
        asked += written.asked
    selection = labels.of(context.data.selection.rows)
    figures |= _quality(selection.log_p_nC, context.data.selection, context.data.labels)
    asked += found.asked + selection.asked
    context.progress.log(
        f"  {stage}: {len(rows)} rows labelled with {len(labels.variants)} prompts; agreement {figures['agreement']:.3f}; "
        f"{asked} new queries, answers in {labels.answers.file.parent.name}"
    )
    return Goal(rows, num_chosen, targets_nC, selection.log_p_nC, written, {**figures, "new_queries": asked})


def _quality(selection_nC: Array, selection: Split, classes: Sequence[str]) -> dict[str, Any]:
    """Returns how often each class is the label, and how many selection rows get the label of the data, which nothing else reads."""
    best_n = selection_nC.argmax(axis=1)
    shares = np.bincount(best_n, minlength=len(classes)) / max(1, len(best_n))
    right = float((best_n == selection.labels.array).mean()) if len(best_n) else None
    return {"selection_shares": dict(zip(classes, shares.tolist(), strict=True)), "selection_accuracy": right}


def _answers(labeller: Labeller, context: Context, key: str) -> Answers:
    from distill.labeller.answers import Answers
    from foundation.machine.device import computing_device

    folder = context.shared or context.scratch
    if labeller.path is not None:
        path = labeller.path
        identity: dict[str, object] = {"model": _digest(path, key), "device": computing_device().type}  # which decides the number format
        return Answers(folder, identity, lambda: _opened(path, f"{key}.path"), context.progress)
    assert labeller.url is not None
    assert labeller.model is not None
    from distill.labeller.api import ApiScorer

    url, model, variable = labeller.url, labeller.model, labeller.key_variable
    return Answers(folder, {"url": url, "model": model}, lambda: ApiScorer(url, model, variable, key), context.progress)


def _opened(path: str, key: str) -> Scorer:
    from distill.labeller.causal import CausalScorer
    from foundation.models.files import find

    return CausalScorer(find(path, key, weights=True), path, key)
