"""AdaRound against its objective in autograd, and by the error of the outputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundation.schemes.int4 import Int4Scales, expand, group_range, group_scale, nearest
from foundation.schemes.int8 import quantize, weight_scale
from quantize.moments import output_errors
from quantize.rounding import adaround as module
from quantize.rounding.adaround import BETA_END, BETA_START, PUSH, WARM_UP, adaround, push, rectified_sigmoid
from quantize.rounding.rounding import better_rows

pytestmark = pytest.mark.whole


def problem(seed: int, outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(rows, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return torch.randn(outputs, inputs, generator=generator), x_NI.T @ x_NI / rows


def error(weight_OI: Tensor, codes_OI: Tensor, scale_OI: Tensor, hessian_II: Tensor) -> float:
    return float(output_errors(weight_OI, codes_OI.float() * scale_OI, hessian_II).sum())


def naive(weight_OI: Tensor, hessian_II: Tensor, scale_OI: Tensor, low: int | Tensor, high: int | Tensor, steps: int) -> Tensor:
    """The paper's objective, written out and differentiated by torch; the units are those of the module."""
    unit_OI = scale_OI / scale_OI.square().mean(dim=1, keepdim=True).sqrt()
    matrix_II = hessian_II / hessian_II.diagonal().mean()
    exact_OI = weight_OI / scale_OI
    fraction_OI = exact_OI - exact_OI.floor()
    v_OI = -torch.log(1.2 / (fraction_OI + 0.1) - 1)
    v_OI.requires_grad_(True)
    optimizer = torch.optim.Adam([v_OI], lr=1e-2)
    for step in range(steps):
        h_OI = (torch.sigmoid(v_OI) * 1.2 - 0.1).clamp(0, 1)
        d_OI = ((exact_OI.floor() + h_OI).clamp(min=low).clamp(max=high) - exact_OI) * unit_OI
        loss = torch.einsum("oi,ij,oj->", d_OI, matrix_II, d_OI)
        if step / steps >= WARM_UP:
            beta = BETA_END + (BETA_START - BETA_END) * (1 + math.cos(math.pi * (step / steps - WARM_UP) / (1 - WARM_UP))) / 2
            loss = loss + PUSH * (1 - (2 * h_OI - 1).abs() ** beta).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    h_OI = (torch.sigmoid(v_OI.detach()) * 1.2 - 0.1).clamp(0, 1)
    return (exact_OI.floor() + (h_OI >= 0.5)).clamp(min=low).clamp(max=high)


@pytest.mark.parametrize("grouped", [False, True])
def test_codes_are_those_of_the_written_out_objective(grouped: bool) -> None:
    weight_OI, hessian_II = (tensor.double() for tensor in problem(0, 4, 10, 60))
    scale_OI = expand(group_scale(weight_OI, 4), 4, 10) if grouped else weight_scale(weight_OI, 7)[:, None].expand(4, 10)
    found = adaround(weight_OI, hessian_II, scale_OI, -8, 7, steps=300)
    assert torch.equal(found.double(), naive(weight_OI, hessian_II, scale_OI, -8, 7, 300))
    assert not torch.equal(found, quantize(weight_OI, scale_OI, -8, 7))


def test_codes_with_zero_points_are_those_of_the_written_out_objective() -> None:
    weight_OI, hessian_II = (tensor.double() for tensor in problem(0, 4, 10, 60))
    weight_OI += torch.linspace(-2, 2, 4)[:, None]
    scale_OG, zero_OG = group_range(weight_OI, 4)[:2]
    scales = Int4Scales(0.8 * scale_OG, 4, zero_OG)
    scale_OI, (low, high) = scales.expanded(10), scales.bounds(10)
    found = adaround(weight_OI, hessian_II, scale_OI, low, high, steps=300)
    assert torch.equal(found.double(), naive(weight_OI, hessian_II, scale_OI, low, high, 300))
    assert not torch.equal(found, nearest(weight_OI, scale_OI, low, high))
    assert (found == low).any()  # some are cut off on each side
    assert (found == high).any()
    assert torch.equal(scales.differences(found * scale_OI), found)


def test_the_push_is_the_gradient_of_its_term() -> None:
    up = torch.linspace(0.02, 0.98, 25, dtype=torch.float64, requires_grad=True)
    for progress in (0.2, 0.5, 0.99):
        beta = BETA_END + (BETA_START - BETA_END) * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2
        (gradient,) = torch.autograd.grad(PUSH * (1 - (2 * up - 1).abs() ** beta).sum(), up)
        torch.testing.assert_close(push(up.detach(), progress), gradient)
    assert not push(up.detach(), 0.1).any()


def test_h_starts_at_the_fraction_and_reaches_both_ends() -> None:
    assert rectified_sigmoid(torch.tensor([-9.0, 0.0, 9.0])).tolist() == [0, 0.5, 1]


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 12), st.integers(1, 30), st.sampled_from([1, 7, 127]))
@settings(max_examples=12, deadline=None)
def test_every_weight_goes_down_or_up_and_no_output_gets_worse(seed: int, outputs: int, inputs: int, rows: int, high: int) -> None:
    weight_OI, hessian_II = problem(seed, outputs, inputs, rows)
    scale_OI = 0.9 * weight_scale(weight_OI, high)[:, None].expand(weight_OI.shape)  # the largest are clipped
    nearest_OI = quantize(weight_OI, scale_OI, -high, high)
    found_OI = adaround(weight_OI, hessian_II, scale_OI, -high, high, steps=50)
    below_OI = (weight_OI / scale_OI).floor()
    down, up = (bound.clamp(-high, high).to(torch.int8) for bound in (below_OI, below_OI + 1))
    assert ((found_OI == down) | (found_OI == up)).all()
    chosen_OI, _, _ = better_rows(weight_OI, nearest_OI, found_OI, scale_OI, hessian_II)
    assert error(weight_OI, chosen_OI, scale_OI, hessian_II) <= error(weight_OI, nearest_OI, scale_OI, hessian_II)


@pytest.mark.parametrize("high", [7, 127])
def test_correlated_inputs_gain_much(high: int) -> None:
    weight_OI, hessian_II = problem(1, 10, 64, 400)
    scale_OI = weight_scale(weight_OI, high)[:, None].expand(weight_OI.shape)
    nearest_OI, found_OI = quantize(weight_OI, scale_OI, -high, high), adaround(weight_OI, hessian_II, scale_OI, -high, high)
    nearest, found = (error(weight_OI, codes_OI, scale_OI, hessian_II) for codes_OI in (nearest_OI, found_OI))
    assert found < 0.6 * nearest


def test_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI, hessian_II = problem(2, 3, 8, 40)
    scale_OI = weight_scale(weight_OI, 7)[:, None].expand(weight_OI.shape)
    found = adaround(weight_OI, hessian_II, scale_OI, -7, 7, steps=40)
    torch.rand(7)
    assert torch.equal(adaround(weight_OI, hessian_II, scale_OI, -7, 7, steps=40), found)
    assert module.STEPS >= 500


def test_inputs_that_were_always_zero_are_no_obstacle() -> None:
    weight_OI = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    scale_OI = weight_scale(weight_OI, 7)[:, None].expand(weight_OI.shape)
    assert torch.equal(adaround(weight_OI, torch.zeros(5, 5), scale_OI, -7, 7, steps=60), quantize(weight_OI, scale_OI, -7, 7))
