"""Orthogonal matrices that spread outliers, of every size: python -m pytest tests/quantize/rotation/test_orthogonal.py"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantize.rotation.orthogonal import Rotation, hadamard, mean_preserving, random_orthogonal, randomized_hadamard

DRAWS = {"hadamard": randomized_hadamard, "mean": mean_preserving}


def drawn(kind: str, size: int, seed: int = 0) -> Rotation:
    return DRAWS[kind](size, torch.Generator().manual_seed(seed))


def eye(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 24, 28, 32, 36, 44, 60, 76, 128, 180])
def test_a_hadamard_matrix_has_orthogonal_rows_of_ones(size: int) -> None:
    matrix = hadamard(size)
    assert matrix is not None
    assert bool(matrix.abs().eq(1).all())
    assert torch.equal(matrix @ matrix.T, size * eye(size))


@pytest.mark.parametrize("size", [3, 6, 10, 18, 52, 97])
def test_no_hadamard_matrix_is_claimed_for_other_sizes(size: int) -> None:
    assert hadamard(size) is None


@pytest.mark.parametrize("kind", list(DRAWS))
@given(size=st.integers(1, 150), seed=st.integers(0, 1000))
def test_every_size_has_an_orthogonal_matrix(kind: str, size: int, seed: int) -> None:
    rotation = drawn(kind, size, seed)
    matrix = rotation.matrix_DD
    assert rotation.size == size
    torch.testing.assert_close(matrix @ matrix.T, eye(size), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", list(DRAWS))
@pytest.mark.parametrize("size", [1, 24, 37, 576])
def test_vectors_are_multiplied_by_the_matrix(kind: str, size: int) -> None:
    """Beside the Kronecker product written out."""
    rotation = drawn(kind, size)
    product = torch.ones(1, 1, dtype=torch.float64)
    for factor in rotation.factors:
        product = torch.kron(product, factor)
    x_ND = torch.randn(5, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(rotation.of(x_ND), x_ND @ (rotation.signs_D[:, None] * product))
    torch.testing.assert_close(rotation.of(x_ND), x_ND @ rotation.matrix_DD)


@pytest.mark.first(1)
@pytest.mark.parametrize("size", [64, 576, 768, 896, 960, 1536, 2560, 3584])
def test_one_large_entry_becomes_equal_ones_in_the_sizes_of_models(size: int) -> None:
    matrix = drawn("hadamard", size).matrix_DD
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))


@pytest.mark.parametrize("size", [12, 52, 101, 576])
def test_large_entries_do_not_meet_in_one_channel(size: int) -> None:
    """The vector of ones is a row of Sylvester's matrix: without signs all of it would land in the first channel."""
    ones = torch.ones(1, size, dtype=torch.float64)
    assert float(drawn("hadamard", size).of(ones).abs().max()) < 0.7 * size**0.5


@pytest.mark.parametrize("size", [1, 2, 16, 37])
def test_a_mean_is_kept(size: int) -> None:
    rotation = drawn("mean", size)
    x_ND = torch.randn(5, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(rotation.of(x_ND).mean(dim=1), x_ND.mean(dim=1))
    if size > 2:
        assert float((rotation.matrix_DD - eye(size)).abs().max()) > 0.3


@pytest.mark.parametrize("kind", list(DRAWS))
def test_the_seed_decides(kind: str) -> None:
    first, again, other = drawn(kind, 24, 3), drawn(kind, 24, 3), drawn(kind, 24, 4)
    assert torch.equal(first.matrix_DD, again.matrix_DD)
    assert not torch.equal(first.matrix_DD, other.matrix_DD)


def test_random_matrices_have_no_preferred_sign() -> None:
    """QR alone returns a diagonal of one sign more often."""
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.stack([random_orthogonal(3, generator).diagonal() for _ in range(400)])
    assert float(diagonal.mean(dim=0).abs().max()) < 0.15
