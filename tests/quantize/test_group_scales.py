"""Scales and zero points of groups: the search against a loop, with and without the Hessian."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundation.schemes.int4 import Int4Scales, group_scale, num_groups
from foundation.schemes.scales import Grid
from quantize.choices import GroupRange
from quantize.group_scales import CLIPS, GroupMoments, Groups, diagonal_blocks, full_grid, searched_grid
from quantize.moments import Moments, output_errors


def problem(seed: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(3 * inputs, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return torch.randn(outputs, inputs, generator=generator), x_NI.T @ x_NI / len(x_NI)


def scales_of(grid: Grid, group_size: int) -> Int4Scales:
    return Int4Scales(grid.scale, group_size, grid.zero_point)


def naive_errors(weight: Tensor, group_size: int, hessian: Tensor, o: int, g: int, symmetric: bool) -> list[float]:
    """Returns the error of one group for every clip: of the symmetric range, and of that from the smallest to the largest weight."""
    part = slice(g * group_size, (g + 1) * group_size)
    w, h = weight[o, part].double(), hessian[part, part].double()
    low, high = min(0.0, float(w.min())), max(0.0, float(w.max()))
    ranges = [(float(w.abs().max()) / 7, 0)] + ([] if symmetric else [((high - low) / 15, round(-8 - low / ((high - low) / 15)))])
    errors = []
    for whole, zero in ranges:
        for clip in (1.0, *CLIPS):
            scale = whole * clip
            codes = [min(max(round(float(value) / scale) + zero, -8), 7) for value in w]
            d = w - torch.tensor([(code - zero) * scale for code in codes], dtype=torch.float64)
            errors.append(float(d @ h @ d))
    return errors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("inputs", "group_size"), [(8, 4), (10, 4), (3, 16), (40, 32)])
def test_no_clip_is_better_for_its_group(inputs: int, group_size: int, weighted: bool, symmetric: bool) -> None:
    weight, hessian = problem(0, 4, inputs)
    hessian = hessian if weighted else torch.eye(inputs)
    found = searched_grid(weight, group_size, diagonal_blocks(hessian, group_size) if weighted else None, symmetric=symmetric)
    assert found.scale.shape == (4, num_groups(inputs, group_size))
    assert (found.zero_point is None) == symmetric
    full = group_scale(weight, group_size)
    rounded = scales_of(found, group_size).on_grid(weight)
    for o in range(4):
        for g in range(found.scale.shape[1]):
            part, errors = slice(g * group_size, (g + 1) * group_size), naive_errors(weight, group_size, hessian, o, g, symmetric)
            d = (weight[o, part] - rounded[o, part]).double()
            assert float(d @ hessian[part, part].double() @ d) == pytest.approx(min(errors), rel=1e-3, abs=1e-9)
            if symmetric:
                assert 0.5 - 1e-6 <= float(found.scale[o, g] / full[o, g]) <= 1


def test_a_negative_extreme_may_have_the_code_minus_eight() -> None:
    weight = torch.tensor([[-8.0, 1, 2, 3, 4, 5, 6, 7]])
    grid = searched_grid(weight, 8, None, symmetric=True)
    assert grid.scale.item() == pytest.approx(1)
    assert torch.equal(scales_of(grid, 8).on_grid(weight), weight)


def test_sixteen_levels_on_one_side_of_zero_are_all_used() -> None:
    weight = torch.arange(16.0)[None]
    for values in (weight, -weight):
        grid = searched_grid(values, 16, None, symmetric=False)
        assert torch.equal(scales_of(grid, 16).on_grid(values), values)
        assert sorted(scales_of(grid, 16).codes(values)[0].tolist()) == list(range(-8, 8))
    assert (scales_of(searched_grid(weight, 16, None, symmetric=True), 16).on_grid(weight) - weight).abs().max() >= 0.5


@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([1, 5, 16, 64]), st.sampled_from([0.0, 0.1, -1.0, 3.0]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_zero_points_never_make_a_group_worse(seed: int, groups: int, group_size: int, mean: float, weighted: bool) -> None:
    outputs = 6
    weight, hessian = problem(seed, outputs, group_size * groups)
    weight += mean
    blocks = diagonal_blocks(hessian if weighted else torch.eye(len(hessian)), group_size)

    def errors(symmetric: bool) -> Tensor:
        grid = searched_grid(weight, group_size, diagonal_blocks(hessian, group_size) if weighted else None, symmetric=symmetric)
        d = (scales_of(grid, group_size).on_grid(weight) - weight).reshape(outputs, -1, group_size)
        return torch.einsum("ogi,gij,ogj->og", d.double(), blocks.double(), d.double())

    before, after = errors(True), errors(False)
    assert (after <= before * (1 + 1e-4) + 1e-9).all()


@pytest.mark.whole
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 20), st.integers(1, 8), st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_best_of_both_is_best_for_every_output(seed: int, outputs: int, inputs: int, group_size: int, symmetric: bool) -> None:
    weight, hessian = problem(seed, outputs, inputs)
    errors = [
        output_errors(weight, scales_of(grid, group_size).on_grid(weight), hessian)
        for grid in (
            Groups(group_size, symmetric).best(weight, hessian),
            searched_grid(weight, group_size, diagonal_blocks(hessian, group_size), symmetric=symmetric),
            searched_grid(weight, group_size, None, symmetric=symmetric),
        )
    ]
    assert torch.equal(errors[0], torch.minimum(errors[1], errors[2]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_name_what_their_ranges_are_chosen_by(symmetric: bool) -> None:
    weight, hessian = problem(3, 4, 10)
    expected: dict[GroupRange, Grid] = {
        "minmax": full_grid(weight, 4, symmetric=symmetric),
        "weights": searched_grid(weight, 4, None, symmetric=symmetric),
        "outputs": searched_grid(weight, 4, diagonal_blocks(hessian, 4), symmetric=symmetric),
    }
    for name, grid in expected.items():
        found = Groups(4, symmetric, name).grid(weight, diagonal_blocks(hessian, 4))
        assert torch.equal(found.scale, grid.scale)
        assert (found.zero_point is None) == symmetric
        assert found.zero_point is None or torch.equal(found.zero_point, grid.zero_point)  # type: ignore[arg-type]
    assert not torch.equal(expected["weights"].scale, expected["outputs"].scale)


@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 7), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_moments_of_groups_are_the_blocks_of_all_moments(seed: int, inputs: int, group_size: int, sizes: list[int]) -> None:
    rows = torch.randn(sum(sizes), inputs, generator=torch.Generator().manual_seed(seed))
    groups, whole = GroupMoments(group_size), Moments()
    for part in rows.split(sizes):
        groups.add(part)
        whole.add(part)
    assert groups.total == whole.total == sum(sizes)
    if groups.total:
        torch.testing.assert_close(groups.blocks_Ggg, diagonal_blocks(whole.hessian_II, group_size), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="NaN or infinite"):
        groups.add(torch.full((1, inputs), float("inf")))


def test_blocks_lie_on_the_diagonal() -> None:
    hessian = torch.arange(25.0).reshape(5, 5)
    blocks = diagonal_blocks(hessian, 2)
    assert torch.equal(blocks[0], hessian[:2, :2])
    assert torch.equal(blocks[1], hessian[2:4, 2:4])
    assert blocks[2].tolist() == [[24, 0], [0, 0]]


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_get_the_scale_one(symmetric: bool) -> None:
    for grid in (searched_grid(torch.zeros(2, 6), 4, None, symmetric=symmetric), full_grid(torch.zeros(2, 6), 4, symmetric=symmetric)):
        assert grid.scale.tolist() == [[1, 1], [1, 1]]
        assert (scales_of(grid, 4).on_grid(torch.zeros(2, 6)) == 0).all()


def random_weights(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(5, 256, 1024, generator=generator)
    match kind:
        case "heavy":
            return normal[0] / normal[1:].square().mean(0).sqrt()  # Student's t with 4 degrees of freedom
        case "skewed":
            return (normal[0].square() + normal[1].square()) / 2 - 1  # exponential
    return normal[0]


@pytest.mark.parametrize(
    ("kind", "group_size", "expected"),
    [("gaussian", 32, (21.3, 22.2)), ("gaussian", 128, (19.9, 20.4)), ("heavy", 128, (15.5, 17.2)), ("skewed", 128, (15.5, 19.8))],
)
def test_zero_points_gain_what_the_documentation_says(kind: str, group_size: int, expected: tuple[float, float]) -> None:
    weight = random_weights(kind)
    for symmetric, told in zip((True, False), expected, strict=True):
        error = scales_of(searched_grid(weight, group_size, None, symmetric=symmetric), group_size).on_grid(weight) - weight
        assert 10 * float(torch.log10(weight.square().sum() / error.square().sum())) == pytest.approx(told, abs=0.06)
