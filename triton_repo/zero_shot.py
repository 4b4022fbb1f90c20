"""Labels that nobody trained for: a served entailment model says which of the given labels follow from a text.

    row k            (text, template with label k), all labels in one request
    several = False  score_k = softmax over the labels of the entailment logits              one label holds
    several = True   score_k = softmax of (contradiction, entailment) of row k, entailment   any number holds

Yin et al. 2019, https://arxiv.org/abs/1909.00161; scores as those of Transformers' zero-shot pipeline. That one truncates the text alone
where both are too long; here the longer of the two is truncated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foundation.core.errors import InputError
from foundation.standalone.response import LOGITS
from triton_repo.client import tensors

TEMPLATE = "This example is {}."


def zero_shot(
    client: Any, model: str, text: str, labels: Sequence[str], *, classes: Sequence[str], template: str = TEMPLATE, several: bool = False
) -> list[tuple[str, float]]:
    """Returns the labels with their scores, the best first.

    Args:
        client: `tritonclient.grpc.InferenceServerClient`.
        model: Name of a served text classifier of pairs that was trained for entailment.
        text: The text.
        labels: What it may be about.
        classes: Names of the classes of the model by id, one of which begins with "entail", and for `several` one with "contra".
        template: Sentence with `{}` in place of the label.
        several: Whether any number of labels may hold; else the scores add up to 1.

    Raises:
        InputError: The template has no place for the label, there are no labels, or the classes are those of another model.
    """
    from tritonclient.grpc import InferInput

    if "{}" not in template or not labels:
        raise InputError(
            f"zero_shot: template {template!r}, {len(labels)} labels given; {{}} in the template and at least one label are needed"
        )
    entailed = _place(classes, "entail")
    answer = client.infer(model, tensors([(text, template.replace("{}", label)) for label in labels], InferInput))
    logits = answer.as_numpy(LOGITS).astype(np.float64)
    if logits.shape[1] != len(classes):
        raise InputError(f"zero_shot: classes: {len(classes)} given, model {model} has {logits.shape[1]}; name all of them, ordered by id")
    columns = logits[:, [_place(classes, "contra"), entailed]] if several else logits[:, [entailed]].T
    scores = _softmax(columns)[:, 1] if several else _softmax(columns)[0]
    order = np.argsort(-scores, kind="stable")
    return [(labels[index], float(scores[index])) for index in order]


def _place(classes: Sequence[str], start: str) -> int:
    found = [index for index, name in enumerate(classes) if name.lower().startswith(start)]
    if len(found) != 1:
        raise InputError(f"zero_shot: classes: {', '.join(classes)} given; exactly one has to begin with {start!r}")
    return found[0]


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
