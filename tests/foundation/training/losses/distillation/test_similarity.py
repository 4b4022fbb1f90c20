from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.distillation.similarity import similarity_loss


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


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 99))
def test_shares_of_a_batch_have_the_losses_and_add_up_to_the_gradient_of_the_whole(rows: int, processes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(rows, 4, generator=generator, requires_grad=True), torch.randn(rows, 3, generator=generator)
    whole = similarity_loss(student, teacher)
    found, total = torch.zeros(rows), torch.zeros_like(student)
    for process in range(processes):
        own = torch.arange(rows) % processes == process
        losses = similarity_loss(student, teacher, own)
        assert not losses[~own].any()
        found += losses.detach()
        total += torch.autograd.grad(losses.sum(), student)[0]
    torch.testing.assert_close(found, whole.detach())
    torch.testing.assert_close(total, torch.autograd.grad(whole.sum(), student)[0], rtol=1e-4, atol=1e-6)


def test_turned_and_scaled_vectors_are_as_similar() -> None:
    teacher = torch.randn(6, 3)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3))
    torch.testing.assert_close(similarity_loss(5 * teacher @ rotation, teacher), torch.zeros(6), atol=1e-6, rtol=0)


def test_a_single_text_has_no_loss_but_a_gradient() -> None:
    student = torch.randn(1, 3, requires_grad=True)
    loss = similarity_loss(student, torch.randn(1, 3))
    loss.sum().backward()
    assert loss.tolist() == [0.0]
