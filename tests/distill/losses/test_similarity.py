from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.losses.similarity import similarity_loss


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_it_is_the_formula_for_any_widths(rows: int, ours: int, theirs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, width, generator=generator) for width in (ours, theirs))
    found, (s, t) = similarity_loss(student, teacher), (student.tolist(), teacher.tolist())
    for i in range(rows):
        expected = sum((cosine(s[i], s[j]) - cosine(t[i], t[j])) ** 2 for j in range(rows) if j != i) / (rows - 1)
        assert math.isclose(float(found[i]), expected, rel_tol=1e-4, abs_tol=1e-5)


def test_turned_and_scaled_vectors_are_as_similar() -> None:
    teacher = torch.randn(6, 3)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3))
    torch.testing.assert_close(similarity_loss(5 * teacher @ rotation, teacher), torch.zeros(6), atol=1e-6, rtol=0)


def test_a_single_text_has_no_loss_but_a_gradient() -> None:
    student = torch.randn(1, 3, requires_grad=True)
    loss = similarity_loss(student, torch.randn(1, 3))
    loss.sum().backward()
    assert loss.tolist() == [0.0]
