"""Gatekeeper: against a loop over rows, by where it pulls the confidence, and where it is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.distillation.gatekeeper import Gatekeeper, gatekeeper
from foundation.training.losses.distillation.loss import Setting, Shape
from tests.problems import raises_problem

TWO = Shape(kind="bert", layers=1, hidden=8, heads=1, classes=2)


@given(st.integers(1, 6), st.integers(2, 5), st.floats(0.05, 0.95), st.integers(0, 99), st.sampled_from([1.0, 30.0]))
def test_each_row_has_one_of_two_losses(rows: int, classes: int, alpha: float, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (size * torch.randn(rows, classes, generator=generator) for _ in range(2))
    expected = []
    for ours, theirs in zip(student.double(), teacher, strict=True):
        p = [math.exp(value - max(ours.tolist())) for value in ours.tolist()]
        p = [value / sum(p) for value in p]
        wanted, found = int(theirs.argmax()), int(ours.argmax())
        divergence = sum(value * math.log(value * classes) for value in p if value > 0)
        expected.append(alpha * -math.log(p[wanted]) if wanted == found else (1 - alpha) * divergence)
    assert gatekeeper(student, teacher, alpha).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_it_ranks_the_rows_on_which_they_differ_last() -> None:
    generator = torch.Generator().manual_seed(0)
    start, teacher = torch.randn(64, 3, generator=generator), torch.randn(64, 3, generator=generator)
    agree = start.argmax(dim=1) == teacher.argmax(dim=1)
    student = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([student], lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        gatekeeper(student, teacher, 0.5).sum().backward()
        optimizer.step()
    sure = student.detach().softmax(dim=1).amax(dim=1)
    still = student.detach().argmax(dim=1) == teacher.argmax(dim=1)
    assert still[agree].all(), "what was the teacher's answer stays it"
    assert sure[still].min() > sure[~still].max()


def test_equal_and_huge_logits_have_a_finite_gradient() -> None:
    student = torch.tensor([[0.0, 0.0], [1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    gatekeeper(student, torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), 0.3).sum().backward()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize(
    "task", ["text-regression", "multi-label-classification", "question-answering", "token-classification", "text-generation"]
)
def test_it_is_for_one_of_several_classes(task: str) -> None:
    with raises_problem("distill.losses.0", "gatekeeper", task, "soft_target"):
        Gatekeeper().wants(Setting(TWO, TWO, task, "distill.losses.0"))  # type: ignore[arg-type]  # the names of the table of tasks
    assert Gatekeeper().wants(Setting(TWO, TWO, "image-classification", "loss"))[0].logits
