from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from foundation.labels.next_token import IGNORED
from foundation.training.losses.distillation.generalized_jsd import GeneralizedJsd, divergence
from foundation.training.losses.distillation.loss import Setting, Shape
from tests.problems import raises_problem

LOGITS = st.lists(st.floats(-8, 8), min_size=4, max_size=4)
BETAS = st.floats(0.01, 0.99)


def naive(student: list[float], teacher: list[float], beta: float, temperature: float) -> float:
    def softmax(logits: list[float]) -> list[float]:
        total = sum(math.exp(value / temperature) for value in logits)
        return [math.exp(value / temperature) / total for value in logits]

    q, p = softmax(student), softmax(teacher)
    m = [beta * one + (1 - beta) * other for one, other in zip(p, q, strict=True)]
    from_teacher = sum(one * math.log(one / mixed) for one, mixed in zip(p, m, strict=True))
    from_student = sum(one * math.log(one / mixed) for one, mixed in zip(q, m, strict=True))
    return temperature**2 * (beta * from_teacher + (1 - beta) * from_student)


@given(LOGITS, LOGITS, BETAS, st.floats(0.5, 4))
def test_it_is_the_formula(student: list[float], teacher: list[float], beta: float, temperature: float) -> None:
    found = divergence(torch.tensor(student, dtype=torch.float64), torch.tensor(teacher, dtype=torch.float64), beta, temperature)
    assert float(found) == pytest.approx(naive(student, teacher, beta, temperature), rel=1e-6, abs=1e-9)


@given(LOGITS, LOGITS, BETAS)
def test_it_is_bounded_and_zero_for_equal_probabilities(student: list[float], teacher: list[float], beta: float) -> None:
    s, t = torch.tensor(student, dtype=torch.float64), torch.tensor(teacher, dtype=torch.float64)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert -1e-12 <= float(divergence(s, t, beta, 1.0)) <= entropy + 1e-9
    assert float(divergence(t + 3, t, beta, 1.0)) == pytest.approx(0, abs=1e-12)


def test_its_ends_are_the_two_divergences() -> None:
    """Equation 2 of the paper: JSD(beta) / beta tends to KL(p || q) for beta to 0, JSD(beta) / (1 - beta) to KL(q || p) for beta to 1."""
    student, teacher = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64)
    q, p = torch.softmax(student, 0), torch.softmax(teacher, 0)
    assert float(divergence(student, teacher, 1e-6, 1.0)) / 1e-6 == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)
    assert float(divergence(student, teacher, 1 - 1e-6, 1.0)) / 1e-6 == pytest.approx(float((q * (q / p).log()).sum()), rel=1e-4)


def test_only_the_student_learns() -> None:
    student, teacher = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    divergence(student, teacher, 0.5, 1.0).sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert teacher.grad is None


def shape(classes: int) -> Shape:
    return Shape(kind="gpt2", layers=1, hidden=8, heads=1, classes=classes)


def inputs(task: Any, student: Tensor, teacher: Tensor, labels: Tensor) -> Any:
    setting = Setting(shape(3), shape(3), task, "stages.distill.losses[0]")
    given = {"logits": student}, {"logits": teacher}
    return SimpleNamespace(
        setting=setting,
        student=SimpleNamespace(**given[0]),
        teacher=SimpleNamespace(**given[1]),
        batch=SimpleNamespace(labels=labels),
        temperature=2.0,
    )


def test_text_is_the_mean_over_the_predicted_tokens() -> None:
    student, teacher = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    labels = torch.tensor([[IGNORED, 1, 2], [0, IGNORED, IGNORED]])
    found = GeneralizedJsd(beta=0.3).parts(inputs("text-generation", student, teacher, labels), None)["generalized_jsd"]
    for row, kept in ((0, (1, 2)), (1, (0,))):
        expected = [naive(student[row, at].tolist(), teacher[row, at].tolist(), 0.3, 2.0) for at in kept]
        assert float(found[row]) == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_classes_are_compared_row_by_row() -> None:
    student, teacher = torch.randn(2, 3), torch.randn(2, 3)
    found = GeneralizedJsd().parts(inputs("text-classification", student, teacher, torch.zeros(2)), None)["generalized_jsd"]
    assert float(found[1]) == pytest.approx(naive(student[1].tolist(), teacher[1].tolist(), 0.5, 2.0), rel=1e-4)


def test_what_has_no_probabilities_is_refused() -> None:
    with raises_problem("stages.distill.losses[0]", "generalized_jsd", "text-regression"):
        GeneralizedJsd().wants(Setting(shape(1), shape(1), "text-regression", "stages.distill.losses[0]"))
    with pytest.raises(ValidationError, match="beta"):
        GeneralizedJsd(beta=1.0)
