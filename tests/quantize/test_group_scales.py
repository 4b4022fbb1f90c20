"""Scales of groups: the search against a loop, with and without the Hessian."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.schemes.int4 import Int4Scales, group_scale, num_groups
from quantize.group_scales import CLIPS, best_scale, clipped_scale, diagonal_blocks
from quantize.moments import output_errors


def problem(seed: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(3 * inputs, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return torch.randn(outputs, inputs, generator=generator), x_NI.T @ x_NI / len(x_NI)


def naive_errors(weight: Tensor, group_size: int, hessian: Tensor, o: int, g: int) -> list[float]:
    """Returns the error of one group for every clip, the whole range first."""
    part = slice(g * group_size, (g + 1) * group_size)
    w, h = weight[o, part].double(), hessian[part, part].double()
    errors = []
    for clip in (1.0, *CLIPS):
        scale = float(w.abs().max()) / 7 * clip
        d = w - (w / scale).round().clamp(-8, 7) * scale
        errors.append(float(d @ h @ d))
    return errors


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("inputs", "group_size"), [(8, 4), (10, 4), (3, 16)])
def test_no_clip_is_better_for_its_group(inputs: int, group_size: int, weighted: bool) -> None:
    weight, hessian = problem(0, 4, inputs)
    hessian = hessian if weighted else torch.eye(inputs)
    found = clipped_scale(weight, group_size, hessian if weighted else None)
    full = group_scale(weight, group_size)
    assert found.shape == (4, num_groups(inputs, group_size))
    for o in range(4):
        for g in range(found.shape[1]):
            part, errors = slice(g * group_size, (g + 1) * group_size), naive_errors(weight, group_size, hessian, o, g)
            d = (weight[o, part] - (weight[o, part] / found[o, g]).round().clamp(-8, 7) * found[o, g]).double()
            assert float(d @ hessian[part, part].double() @ d) == pytest.approx(min(errors), rel=1e-3, abs=1e-9)
            assert 0.5 - 1e-6 <= float(found[o, g] / full[o, g]) <= 1


def test_a_negative_extreme_may_have_the_code_minus_eight() -> None:
    weight = torch.tensor([[-8.0, 1, 2, 3, 4, 5, 6, 7]])
    scale = clipped_scale(weight, 8)
    assert scale.item() == pytest.approx(1)
    assert torch.equal(Int4Scales(scale, 8).on_grid(weight), weight)


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 20), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_the_best_of_both_is_best_for_every_output(seed: int, outputs: int, inputs: int, group_size: int) -> None:
    weight, hessian = problem(seed, outputs, inputs)
    errors = [
        output_errors(weight, Int4Scales(scale, group_size).on_grid(weight), hessian)
        for scale in (
            best_scale(weight, group_size, hessian),
            clipped_scale(weight, group_size, hessian),
            clipped_scale(weight, group_size),
        )
    ]
    assert torch.equal(errors[0], torch.minimum(errors[1], errors[2]))


def test_blocks_lie_on_the_diagonal() -> None:
    hessian = torch.arange(25.0).reshape(5, 5)
    blocks = diagonal_blocks(hessian, 2)
    assert torch.equal(blocks[0], hessian[:2, :2])
    assert torch.equal(blocks[1], hessian[2:4, 2:4])
    assert blocks[2].tolist() == [[24, 0], [0, 0]]


def test_zeros_get_the_scale_one() -> None:
    assert clipped_scale(torch.zeros(2, 6), 4).tolist() == [[1, 1], [1, 1]]
