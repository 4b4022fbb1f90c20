from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.distillation.logit_standardization import standardized
from tests.soft_target import soft_target

LOGITS = st.lists(st.integers(-80, 80), min_size=3, max_size=6, unique=True).map(lambda values: [value / 10 for value in values])


@given(LOGITS)
def test_it_is_the_formula(logits: list[float]) -> None:
    expected = [(z - statistics.mean(logits)) / statistics.stdev(logits) for z in logits]
    torch.testing.assert_close(standardized(torch.tensor([logits])), torch.tensor([expected]), atol=1e-4, rtol=1e-4)


@given(LOGITS, st.floats(0.1, 50), st.floats(-20, 20))
def test_neither_scale_nor_shift_is_learned(logits: list[float], scale: float, shift: float) -> None:
    teacher = torch.tensor([logits])
    assert float(soft_target(standardized(scale * teacher + shift), standardized(teacher), 2.0)) == pytest.approx(0, abs=1e-4)


def test_equal_logits_stay_finite() -> None:
    student = torch.zeros(1, 4, requires_grad=True)
    loss = soft_target(standardized(student), standardized(torch.tensor([[1.0, 2.0, 3.0, 0.0]])), 2.0)
    assert loss.isfinite().all()
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
