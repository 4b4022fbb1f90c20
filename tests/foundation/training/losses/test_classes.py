from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foundation.training.losses.classes import ClassLoss
from foundation.training.losses.value import ValueLoss
from tests.soft_target import soft_target


def naive(student: list[float], teacher: list[float], temperature: float) -> float:
    def softmax(logits: list[float]) -> list[float]:
        powers = [math.exp((z - max(logits)) / temperature) for z in logits]
        return [power / sum(powers) for power in powers]

    return temperature**2 * sum(p * math.log(p / q) for p, q in zip(softmax(teacher), softmax(student), strict=True))


ROWS = st.integers(2, 5).flatmap(lambda n: st.tuples(*2 * [st.lists(st.floats(-8, 8), min_size=n, max_size=n)]))


@given(ROWS, st.floats(0.5, 10))
def test_it_is_the_formula(rows: tuple[list[float], list[float]], temperature: float) -> None:
    student, teacher = (torch.tensor([row]) for row in rows)
    assert float(soft_target(student, teacher, temperature)) == pytest.approx(naive(*rows, temperature), rel=1e-3, abs=1e-4)


@given(ROWS, st.floats(0.5, 10))
def test_it_is_never_negative_and_0_for_equal_answers(rows: tuple[list[float], list[float]], temperature: float) -> None:
    student, teacher = (torch.tensor([row]) for row in rows)
    assert float(soft_target(student, teacher, temperature)) >= -1e-4
    assert float(soft_target(teacher + 3, teacher, temperature)) == pytest.approx(0, abs=1e-4)  # softmax does not see a constant


def test_the_gradient_keeps_its_size_over_temperatures() -> None:
    """For T far above the logits T^2 KL tends to half the squared difference of the centred logits, divided by C (section 2.1)."""
    student, teacher = torch.tensor([[1.0, -2.0, 0.5]], requires_grad=True), torch.tensor([[0.3, 0.4, -0.9]])
    (gradient,) = torch.autograd.grad(soft_target(student, teacher, 1000.0).sum(), student)
    centred = (student - student.mean()) - (teacher - teacher.mean())
    torch.testing.assert_close(gradient, centred / 3, atol=2e-3, rtol=0)


def test_extreme_logits_stay_finite() -> None:
    student, teacher = torch.tensor([[1e4, -1e4]], requires_grad=True), torch.tensor([[-1e4, 1e4]])
    loss = soft_target(student, teacher, 1.0)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_a_regression_is_the_squared_difference() -> None:
    result = ValueLoss().taught(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]]), torch.zeros(2), 4.0)
    assert result.tolist() == [1.0, 9.0]


def test_hard_targets_are_the_formulas() -> None:
    logits, labels = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.0, 4.0]]), torch.tensor([0, 2])
    expected = [-math.log(math.exp(row[y]) / sum(map(math.exp, row))) for row, y in zip(logits.tolist(), labels.tolist(), strict=True)]
    torch.testing.assert_close(ClassLoss().labelled(logits, labels), Tensor(expected))
    assert ValueLoss().labelled(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 1.0])).tolist() == [0.25, 4.0]
