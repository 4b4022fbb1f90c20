from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.machine.parallel import Team
from foundation.training.losses.distillation.loss import Setting, Shape, check_processes
from foundation.training.losses.distillation.relational import Relational, _cosines, _lengths, angle_loss, distance_loss
from tests.problems import raises_problem

Vectors = list[list[float]]


def huber(x: float) -> float:
    return x * x / 2 if abs(x) <= 1 else abs(x) - 0.5


def naive_distances(student: Vectors, teacher: Vectors, i: int) -> float:
    def normalized(vectors: Vectors, i: int, j: int) -> float:
        rows = range(len(vectors))
        mean = sum(math.dist(vectors[a], vectors[b]) for a in rows for b in rows if a != b) / len(rows) / (len(rows) - 1)
        return math.dist(vectors[i], vectors[j]) / mean

    others = [j for j in range(len(student)) if j != i]
    return sum(huber(normalized(student, i, j) - normalized(teacher, i, j)) for j in others) / len(others)


def naive_angles(student: Vectors, teacher: Vectors, j: int) -> float:
    def cosine(vectors: Vectors, i: int, k: int) -> float:
        a, b = ([x - y for x, y in zip(vectors[n], vectors[j], strict=True)] for n in (i, k))
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    others = [(i, k) for i in range(len(student)) for k in range(len(student)) if len({i, j, k}) == 3]
    return sum(huber(cosine(student, i, k) - cosine(teacher, i, k)) for i, k in others) / len(others)


@given(st.integers(3, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_they_are_the_formulas(rows: int, student_width: int, teacher_width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, width, generator=generator) for width in (student_width, teacher_width))
    distances, angles = distance_loss(student, teacher), angle_loss(student, teacher)
    for row in range(rows):
        assert math.isclose(float(distances[row]), naive_distances(student.tolist(), teacher.tolist(), row), rel_tol=1e-3, abs_tol=1e-5)
        assert math.isclose(float(angles[row]), naive_angles(student.tolist(), teacher.tolist(), row), rel_tol=1e-3, abs_tol=1e-4)


@given(st.integers(1, 7), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_shares_of_a_batch_have_the_losses_and_add_up_to_the_gradient_of_the_whole(
    rows: int, processes: int, equal: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)
    if equal and rows > 1:
        student[1] = student[0]
    student = student.double().requires_grad_()
    teacher = teacher.double()

    def total(sums_2: torch.Tensor) -> torch.Tensor:
        return torch.stack([_lengths(vectors[:, None] - vectors).sum() for vectors in (student, teacher)])

    for loss, given_total in ((distance_loss, {"total": total}), (angle_loss, {})):
        whole = loss(student, teacher)
        found, gradient = torch.zeros_like(whole), torch.zeros_like(student)
        for process in range(processes):
            own = torch.arange(rows) % processes == process
            losses = loss(student, teacher, own, **given_total)  # type: ignore[arg-type]
            assert not losses[~own].any()
            found += losses.detach()
            gradient += torch.autograd.grad(losses.sum(), student)[0]
        torch.testing.assert_close(found, whole.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(whole.sum(), student)[0], rtol=1e-6, atol=1e-9)


def test_rotation_scale_and_shift_change_no_relation() -> None:
    teacher = torch.randn(6, 3, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    student = 5 * teacher @ rotation + 7
    for loss in (distance_loss, angle_loss):
        torch.testing.assert_close(loss(student, teacher), torch.zeros(6, dtype=torch.float64), atol=1e-10, rtol=0)


def test_rows_that_coincide_in_the_teacher_alone_add_a_constant() -> None:
    """cos of a row with itself is 1 in the student, and 0 in the teacher where it lies on e_j: H(1) = 1/2 for each such pair."""
    student, teacher = torch.randn(4, 3), torch.randn(4, 3)
    teacher[1] = teacher[0]
    found = angle_loss(student, teacher)
    ours, theirs = _cosines(student), _cosines(teacher)
    for j in range(4):
        total = sum(huber(float(ours[j, i, k] - theirs[j, i, k])) for i in range(4) for k in range(4) if i != k)
        assert float(found[j]) == pytest.approx((total + 0.5 * (j < 2)) / 6, rel=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_and_equal_rows_stay_finite(rows: int) -> None:
    student = torch.ones(rows, 4, requires_grad=True)
    loss = distance_loss(student, torch.randn(rows, 4)) + angle_loss(student, torch.randn(rows, 4))
    loss.sum().backward()
    assert loss.shape == (rows,)
    assert loss.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    if rows == 1:
        assert float(loss.detach()) == 0


def test_a_loss_that_compares_rows_without_gathering_them_needs_one_process() -> None:
    class Alone(Relational):
        GATHERS: ClassVar[bool] = False

    shape = Shape("bert", 1, 3, 1, 2)
    setting = Setting(shape, shape, "text-classification", "distill.losses.0")
    check_processes(Relational(), setting, Team(0, 2))
    check_processes(Alone(), setting, Team(0, 2, tensor=2))  # both have all rows
    with raises_problem("distill.losses.0", "relational", "2 processes", "run one"):
        check_processes(Alone(), setting, Team(0, 2))


@pytest.mark.parametrize("tokens", ["mean", "first"])
def test_a_row_is_the_mean_of_its_tokens_or_the_first(tokens: Any) -> None:
    from foundation.training.distillation.capture import Captured

    hidden, mask = torch.randn(2, 4, 3), torch.tensor([[True, True, True, False], [True, False, False, False]])
    hidden[~mask] = torch.nan
    vectors = Relational(tokens=tokens)._vectors(Captured(torch.empty(0), mask, (), last=hidden))
    expected = torch.stack([hidden[0, :3].mean(0), hidden[1, 0]]) if tokens == "mean" else hidden[:, 0]
    torch.testing.assert_close(vectors, expected)


@pytest.mark.parametrize(("changes", "parts"), [({}, {"distance", "angle"}), ({"angle": 0}, {"distance"}), ({"distance": 0}, {"angle"})])
def test_what_has_no_weight_is_not_computed(changes: Any, parts: set[str]) -> None:
    from foundation.training.distillation.capture import Captured
    from foundation.training.losses.distillation.loss import LossInputs

    captured = Captured(torch.empty(0), torch.ones(4, 2, dtype=torch.bool), (), last=torch.randn(4, 2, 3))
    shape = Shape("bert", 1, 3, 1, 2)
    setting = Setting(shape, shape, "text-classification", "distill.losses.0")
    inputs = LossInputs(setting, None, 1.0, captured, captured, None)  # type: ignore[arg-type]
    assert set(Relational(**changes).parts(inputs, None)) == parts
