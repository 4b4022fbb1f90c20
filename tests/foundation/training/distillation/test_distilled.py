"""The objective with a teacher: its loss written out, and what is remembered of the teacher's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foundation.training.distillation.distilled import Distilled
from foundation.training.losses.classes import ClassLoss
from foundation.training.losses.table import losses_of
from foundation.training.train import Batch


def taught(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    return ClassLoss().taught(logits, target, torch.zeros(len(logits)), temperature)


def test_the_soft_loss_is_the_divergence_written_out() -> None:
    logits, target = torch.randn(5, 3), 3 * torch.randn(5, 3)
    expected = []
    for z, t in zip(logits.double().numpy(), target.double().numpy(), strict=True):
        p, q = (np.exp(values / 2.5) / np.exp(values / 2.5).sum() for values in (t, z))
        expected.append(2.5**2 * float((p * np.log(p / q)).sum()))
    np.testing.assert_allclose(taught(logits, target, 2.5).numpy(), expected, rtol=1e-4)
    assert taught(target, target, 2.5).abs().max() < 1e-6


class Answers(nn.Module):
    """A model that answers what it is told, and counts how often it is asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.given, self.asked = nn.Parameter(logits), 0

    def forward(self, rows: Tensor) -> Any:
        self.asked += 1
        return SimpleNamespace(logits=self.given[rows])


def batch_of(rows: list[int], labels: Tensor) -> Batch:
    return Batch({"rows": torch.tensor(rows)}, labels[rows], np.array(rows), 0, 10)


def test_the_teacher_is_asked_once_a_row() -> None:
    teacher, student = Answers(torch.randn(6, 2)), Answers(torch.randn(6, 2))
    objective, labels = Distilled(teacher, losses_of("text-classification"), 6, 2, 2.0, 0.75), torch.tensor([0, 1, 1, 0, 1, 0])
    for rows, asked in (([0, 1, 2], 1), ([3, 1], 2), ([2, 0], 2), ([5], 3), ([4], 4), ([5, 4, 3, 2, 1, 0], 4)):
        parts = objective(student, batch_of(rows, labels))
        assert teacher.asked == asked
        hard = nn.functional.cross_entropy(student.given[rows], labels[rows], reduction="none")
        torch.testing.assert_close(parts["cross_entropy"], 0.25 * hard)
        torch.testing.assert_close(parts["teacher"], 0.75 * taught(student.given[rows], teacher.given[rows], 2.0))
    sum(part.sum() for part in parts.values()).backward()
    assert student.given.grad is not None
    assert teacher.given.grad is None
    assert not list(objective.parameters())
    assert list(objective.state_dict()) == ["logits"]


def test_logits_that_do_not_fit_are_computed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.training.distillation.distilled.CACHE_BYTES", 6 * 2 * 4 - 1)
    teacher, student, labels = Answers(torch.randn(6, 2)), Answers(torch.randn(6, 2)), torch.zeros(6, dtype=torch.int64)
    objective = Distilled(teacher, losses_of("text-classification"), 6, 2, 2.0, 0.5)
    for asked in (1, 2):
        objective(student, batch_of([0, 1], labels))
        assert teacher.asked == asked
    assert not objective.state_dict()


def test_regression_learns_the_values_of_the_teacher() -> None:
    teacher, student, labels = Answers(torch.randn(6, 1)), Answers(torch.randn(6, 1)), torch.randn(6)
    parts = Distilled(teacher, losses_of("text-regression"), 6, 1, 2.0, 0.75)(student, batch_of([4, 2], labels))
    value, target = student.given[[4, 2], 0], teacher.given[[4, 2], 0]
    torch.testing.assert_close(parts["squared_error"], 0.25 * (value - labels[[4, 2]]) ** 2)
    torch.testing.assert_close(parts["teacher"], 0.75 * (value - target) ** 2)


@pytest.mark.parametrize(("weight", "zero"), [(1.0, "cross_entropy"), (0.0, "teacher")])
def test_what_weighs_nothing_is_zero_and_not_computed(weight: float, zero: str) -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    parts = Distilled(Answers(torch.randn(4, 3)), losses_of("text-classification"), 4, 3, 2.0, weight).parts(
        logits, torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    )
    assert set(parts) == {"cross_entropy", "teacher"}
    assert torch.equal(parts[zero], torch.zeros(4))
    assert {name for name, part in parts.items() if part.requires_grad} == set(parts) - {zero}
