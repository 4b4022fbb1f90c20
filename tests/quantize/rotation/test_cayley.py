"""Steps stay among the orthogonal matrices and go down: python -m pytest tests/quantize/rotation/test_cayley.py"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quantize.rotation.cayley import CayleySgd, cayley, generator, nearest_orthogonal, without_ones
from quantize.rotation.orthogonal import mean_preserving, random_orthogonal

SIZES = (1, 2, 3, 8, 17, 36)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return random_orthogonal(size, torch.Generator().manual_seed(seed))


def error(matrix_DD: Tensor) -> float:
    return float((matrix_DD.T @ matrix_DD - torch.eye(len(matrix_DD), dtype=matrix_DD.dtype)).abs().max())


@pytest.mark.first(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_long_runs_stay_orthogonal(size: int, scale: float) -> None:
    mover = CayleySgd(orthogonal(size))
    for step in range(1000):
        mover.step(scale * drawn(size, size, seed=step), angle=0.3)
    assert error(mover.matrix_DD) < 1e-10
    assert error(nearest_orthogonal(mover.matrix_DD).float()) < 1e-5


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("step", [1e-3, 0.7, 50.0])
def test_a_step_is_the_cayley_transform_of_its_planes(size: int, step: float) -> None:
    """A skew-symmetric matrix turns planes; in the basis of one the transform turns by 2 atan(t w / 2)."""
    skew_DD = drawn(size, size) - drawn(size, size).T
    values, vectors = torch.linalg.eig(skew_DD)
    turned = torch.diag((1 - step * values / 2) / (1 + step * values / 2))
    expected_DD = (vectors @ turned @ torch.linalg.inv(vectors)).real @ orthogonal(size)
    torch.testing.assert_close(cayley(orthogonal(size), skew_DD, step), expected_DD, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", SIZES)
def test_the_generator_is_the_gradient_among_rotations(size: int) -> None:
    """Against differences along every plane, of a loss that is not linear."""
    target_DD, weight_DD, start_DD = drawn(size, size, seed=1), drawn(size, size, seed=2), orthogonal(size, 3)

    def loss(matrix_DD: Tensor) -> Tensor:
        return ((matrix_DD @ weight_DD - target_DD).tanh() ** 2).sum()

    free_DD = start_DD.clone().requires_grad_()
    (gradient_DD,) = torch.autograd.grad(loss(free_DD), free_DD)
    found_DD = generator(start_DD, gradient_DD)
    assert torch.equal(found_DD, -found_DD.T)
    for row in range(size):
        for column in range(row):
            plane_DD = torch.zeros(size, size, dtype=torch.float64)
            plane_DD[row, column], plane_DD[column, row] = 1.0, -1.0
            ahead, behind = (loss(torch.linalg.matrix_exp(sign * 1e-5 * plane_DD) @ start_DD) for sign in (1, -1))
            assert float((ahead - behind) / 2e-5) == pytest.approx(float(found_DD[row, column]), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_step_turns_by_the_angle(size: int) -> None:
    mover = CayleySgd(orthogonal(size))
    before_DD = mover.matrix_DD
    mover.step(1e-9 * drawn(size, size), angle=1e-3)
    turned = mover.matrix_DD @ before_DD.T - torch.eye(size, dtype=torch.float64)
    assert float(turned.norm()) / math.sqrt(size) == pytest.approx(1e-3, rel=1e-3)


def test_descent_finds_a_rotation() -> None:
    target_DD = orthogonal(12, 1)
    if torch.linalg.det(target_DD) < 0:  # no path of rotations leads to a reflection
        target_DD = target_DD[[1, 0, *range(2, 12)]]
    mover = CayleySgd(torch.eye(12, dtype=torch.float64))
    for step in range(400):
        mover.step(mover.matrix_DD - target_DD, angle=0.1 * (1 - step / 400))
    assert float((mover.matrix_DD - target_DD).norm()) < 0.05


def test_no_gradient_no_step() -> None:
    mover = CayleySgd(orthogonal(5))
    mover.step(torch.zeros(5, 5), angle=0.5)
    assert torch.equal(mover.matrix_DD, orthogonal(5))


@pytest.mark.parametrize("size", SIZES[1:])
def test_ones_stay_where_they_are(size: int) -> None:
    start_DD = mean_preserving(size, torch.Generator().manual_seed(0)).matrix_DD
    mover, ones_D = CayleySgd(start_DD, keeps_ones=True), torch.ones(size, dtype=torch.float64)
    for step in range(200):
        mover.step(drawn(size, size, seed=step), angle=0.2)
    torch.testing.assert_close(mover.matrix_DD @ ones_D, ones_D)
    torch.testing.assert_close(ones_D @ mover.matrix_DD, ones_D)
    assert error(mover.matrix_DD) < 1e-10
    assert size == 2 or float((mover.matrix_DD - start_DD).abs().max()) > 0.05


def test_the_nearest_direction_that_keeps_ones() -> None:
    skew_DD = drawn(9, 9) - drawn(9, 9).T
    found_DD = without_ones(skew_DD)
    torch.testing.assert_close(found_DD, -found_DD.T)
    torch.testing.assert_close(found_DD.sum(dim=1), torch.zeros(9, dtype=torch.float64))
    other_DD = without_ones(drawn(9, 9, seed=4) - drawn(9, 9, seed=4).T)
    assert abs(float(((skew_DD - found_DD) * other_DD).sum())) < 1e-10, "what is taken off is orthogonal to all such directions"
