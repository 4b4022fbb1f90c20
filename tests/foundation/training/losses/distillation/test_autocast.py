"""Every loss of distillation has under autocast the value and the gradient that it has in float32, where a student is near its teacher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from foundation.labels import candidates, text_groups
from foundation.labels.tasks import Task
from foundation.training.distillation.capture import Captured, Heads
from foundation.training.losses.distillation.directions import Directions
from foundation.training.losses.distillation.loss import Loss, LossInputs, Setting, Shape
from foundation.training.losses.distillation.margin_mse import MarginMSE
from foundation.training.losses.distillation.presets import AnyLoss
from foundation.training.losses.distillation.projected import Projected
from foundation.training.losses.distillation.relational import Relational

LOSSES: dict[str, type[Loss]] = {kind.model_fields["name"].default: kind for kind in get_args(get_args(AnyLoss)[0])}
RUNS_MODELS = {"mixkd"}
"""It runs both models on inputs of its own; its formulas are those of the labels and of a teacher."""
ROWS, LENGTH, WIDTH, HEADS, LAYERS, CLASSES = 4, 5, 8, 2, 2, 5


def captured(seed: int, apart: float, classes: int = CLASSES) -> Captured:
    """Returns what two models have in common, and noise: one of a batch with padding."""
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=shared) + apart * torch.randn(shape, generator=own)

    mask = torch.arange(LENGTH) < torch.tensor([5, 4, 3, 2])[:, None]
    logits, hidden = drawn(ROWS, classes), tuple(drawn(ROWS, LENGTH, WIDTH) for _ in range(LAYERS + 1))
    blocks = {
        number: Heads(*(drawn(ROWS, HEADS, LENGTH, WIDTH // HEADS) for _ in range(3)), 0.5, torch.ones(1, 1, 1, LENGTH, dtype=torch.bool))
        for number in range(LAYERS)
    }
    return Captured(logits, mask, hidden, blocks, hidden[-1])


def learned(
    loss: Loss, task: Task, labels: Tensor, trained: Any, teacher: Captured, autocast: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the terms, and the gradients by what was captured of the student."""
    student = captured(1, 0.002)
    block = student.blocks[LAYERS - 1]
    leaves = [student.logits, *student.hidden, block.query, block.key, block.value]
    for leaf in leaves:
        leaf.requires_grad_()
    shape = Shape("bert", LAYERS, WIDTH, HEADS, CLASSES)
    batch: Any = SimpleNamespace(labels=labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parts = loss.parts(LossInputs(Setting(shape, shape, task, "key"), batch, 2.0, student, teacher, None), trained)  # type: ignore[arg-type]
    total = torch.stack([part.float().mean() for part in parts.values()]).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return {name: part.detach() for name, part in parts.items()}, [each for each in gradients if each is not None]


def check(loss: Loss, task: Task = "text-classification", labels: Tensor | None = None, trained: Any = None, width: int = CLASSES) -> None:
    labels, teacher = torch.zeros(ROWS, dtype=torch.int64) if labels is None else labels, captured(2, 0.002, width)
    expected, gradients = learned(loss, task, labels, trained, teacher, autocast=False)
    found, ours = learned(loss, task, labels, trained, teacher, autocast=True)
    assert any(bool(each.any()) for each in gradients), "there is something to learn"
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == torch.float32 for name in expected)
    assert all(map(torch.equal, ours, gradients))


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - RUNS_MODELS - {"margin_mse", "projected", "relational"}))
def test_a_student_near_its_teacher_learns_the_same_under_autocast(name: str) -> None:
    shape, loss = Shape("bert", LAYERS, WIDTH, HEADS, CLASSES), LOSSES[name]()
    torch.manual_seed(0)
    check(loss, trained=loss.build(Setting(shape, shape, "text-classification", "key")))


def test_relations_are_the_same_under_autocast() -> None:
    check(Relational(tokens="mean"))
    check(Relational(tokens="first"))


def test_margins_are_the_same_under_autocast() -> None:
    check(MarginMSE(), "reranking", torch.from_numpy(candidates.labels_of([0, 0, 0, 1], [2, 1, 0, 1], [[2, 1], [1]]).array))
    check(MarginMSE(), "sentence-embedding", torch.from_numpy(text_groups.labels_of([("a", "b", "c", "d")]).array))


@pytest.mark.parametrize("projection", ["pca", "learned"])
def test_projections_are_the_same_under_autocast(projection: Any) -> None:
    torch.manual_seed(0)
    directions = Directions(CLASSES, WIDTH)
    directions.fit(torch.from_numpy(np.random.default_rng(0).normal(size=(20, WIDTH)).astype(np.float32)))
    trained = directions if projection == "pca" else torch.nn.Linear(CLASSES, WIDTH, bias=False)
    check(Projected(projection=projection), "sentence-embedding", trained=trained, width=WIDTH)
