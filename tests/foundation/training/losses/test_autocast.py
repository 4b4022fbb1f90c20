"""Every loss has under autocast the value and the gradient that it has in float32, where a model has nearly learned its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels import candidates, spans, tags, text_groups, transcripts, vectors, zero_shot
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.labels.label_sets import LabelSets
from foundation.labels.next_token import Tokens
from foundation.labels.tasks import TASKS, Task
from foundation.labels.value import Numbers
from foundation.training.losses.answer_loss import AnswerLoss
from foundation.training.losses.contrastive import contrastive_loss
from foundation.training.losses.table import loss_names, losses_of

TRIPLETS = [("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i", "j")]
MARGINS = [(0.5,), (0.25,), (0.125, 0.75)]
TAG_NAMES = ("O", "B-A", "I-A")


def near(shape: tuple[int, ...], apart: float = 1e-3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns answers and others that are almost the same."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=generator)
    return first, first + apart * torch.randn(shape, generator=generator)


def texts_that_agree(labels: Labels, column: int) -> Tensor:
    """Returns vectors, of which those with the same number in a column are almost the same, and others not far away."""
    centres, noise = 1 + 0.1 * near((20, 8))[0], 0.02 * near((len(labels), 8), seed=1)[0]
    return centres[torch.from_numpy(labels.array[:, column].astype(np.int64))] + noise


def of_form(form: type[Labels]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns labels of an answer other than vectors, and logits of a student and of a teacher."""
    if form is ClassIds:
        return (torch.tensor([0, 2, 1]), *near((3, 4)))
    if form is LabelSets:
        return (torch.tensor([[True, False, True], [False, False, True]]), *near((2, 3)))
    if form is tags.Tags:
        pieces = [np.array([1, 2]), np.array([3])]
        return (torch.from_numpy(tags.labels_of([["O", "B-A"], ["I-A"]], pieces, TAG_NAMES).array), *near((2, 5, 3)))
    if form is spans.Spans:
        labels = spans.labels_of(np.array([[1, 2], [3, 3]]), [0, 1], [True, True], [[], []])
        return (torch.from_numpy(labels.array), *near((2, 6, 2)))
    if form is transcripts.Transcripts:
        return (torch.from_numpy(transcripts.labels_of(["ab", "b"], ("a", "<pad>", "|", "b")).array), *near((2, 7, 4)))
    if form is Numbers:
        return (near((3,), seed=2)[0], *near((3, 1)))
    assert form is Tokens, form
    return (torch.tensor([[1, 2, 3], [4, 0, 0]], dtype=torch.int32), *near((2, 4, 5)))


def cases() -> list[tuple[str, AnswerLoss, Tensor, Tensor, Tensor]]:
    """Returns name, losses, labels and logits of student and teacher, of every answer and every loss that has a name."""
    made: dict[str, tuple[AnswerLoss, Tensor, Tensor, Tensor]] = {}
    for task in TASKS:
        form, names = TASKS[task].answer.form, loss_names(task)
        if TASKS[task].embeds:
            continue
        if TASKS[task].reranks:
            graded = torch.from_numpy(candidates.labels_of([0, 0, 0, 1, 1], [2, 1, 0, 1, 0], [[2, 1], [1]]).array)
            made |= {name: (losses_of(task, name), graded, *near((5, 1))) for name in names}
        else:
            made[form.__name__] = (losses_of(task), *of_form(form))
    pairs = vectors.labels_of(np.array([0.9, 1.0, 0.2, 0.85]))
    groups, with_margins = text_groups.labels_of(TRIPLETS), text_groups.labels_of(TRIPLETS, MARGINS)
    bare = text_groups.labels_of([group[:2] for group in TRIPLETS])
    searching: Task = "sentence-embedding"
    for name in loss_names(searching):
        kinds = {"scored": pairs, "pairs": bare, "groups": groups} if name != "margin_mse" else {"margins": with_margins}
        for kind, labels in kinds.items():
            if name != "cosine" or kind == "scored":
                answers = texts_that_agree(labels, 0 if kind == "scored" else 1)
                made[f"{name} of {kind}"] = (
                    losses_of(searching, name, labels=labels),
                    torch.from_numpy(labels.array),
                    answers,
                    1.001 * answers,
                )
    return [(name, *case) for name, case in made.items()]


CASES = cases()


def learned(loss: Callable[[Tensor], Tensor], logits: Tensor, autocast: bool) -> tuple[Tensor, Tensor]:
    """Returns the losses of the rows and the gradient of their mean."""
    logits = logits.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = loss(logits)
    return values.detach(), torch.autograd.grad(values.float().mean(), logits)[0]


def check(loss: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    values, gradient = learned(loss, logits, autocast=False)
    assert bool(gradient.any()), "there is something to learn"
    found = learned(loss, logits, autocast=True)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], values)
    assert torch.equal(found[1], gradient)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_labels_and_teachers_teach_the_same_under_autocast(case: Any) -> None:
    name, losses, labels, student, teacher = case
    smoothing = 0.1 if name in ("ClassIds", "Tags", "Spans", "Tokens", "Transcripts") else 0.0
    check(lambda logits: losses.labelled(logits, labels, smoothing), student)
    check(lambda logits: losses.taught(logits, teacher, labels, 2.0), student)
    averaged = [losses.averaged([student, teacher], [0.25, 0.75], 2.0)]
    with torch.autocast("cpu", torch.bfloat16):
        averaged.append(losses.averaged([student, teacher], [0.25, 0.75], 2.0))
    assert torch.equal(*averaged)


@pytest.mark.parametrize("bias", [None, torch.tensor(-3.0)], ids=["CLIP", "SigLIP"])
@pytest.mark.parametrize("own", [False, True])
def test_two_towers_learn_the_same_under_autocast(bias: Tensor | None, own: bool) -> None:
    classes = np.arange(5)
    labels = torch.from_numpy(zero_shot.labels_of(np.tile([0, 1], 5), np.repeat(classes, 2), np.repeat(classes, 2)).array)
    image, text = near((5, 8), 0.2)  # each text is near its image, as after most of a training
    both = functional.normalize(torch.cat([image, text]), dim=1)
    rows = torch.arange(10) < 6 if own else None
    check(lambda logits: contrastive_loss(logits, labels, torch.tensor(20.0), bias, rows), both)
