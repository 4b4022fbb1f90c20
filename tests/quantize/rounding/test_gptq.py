"""GPTQ against a loop that inverts the Hessian anew for every column, and by the error of the outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundation.schemes.int4 import Int4Scales, group_range, nearest
from foundation.schemes.int8 import quantize, weight_scale
from quantize.moments import output_errors
from quantize.rounding.gptq import BLOCK, DAMPING, gptq
from quantize.rounding.rounding import better_rows


def problem(seed: int, outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns a weight and the Hessian of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) + torch.eye(inputs)
    x_NI = torch.randn(rows, inputs, generator=generator) @ mixing * torch.randn(inputs, generator=generator).exp()
    return torch.randn(outputs, inputs, generator=generator), x_NI.T @ x_NI / rows


def damped(hessian_II: Tensor) -> np.ndarray:
    matrix = hessian_II.double().numpy().copy()
    diagonal = np.diagonal(matrix).copy()
    diagonal[diagonal == 0] = 1
    np.fill_diagonal(matrix, diagonal + DAMPING * diagonal.mean())
    return matrix


def naive(
    weight_OI: Tensor, hessian_II: Tensor, scale_OI: Tensor, low: int | np.ndarray, high: int | np.ndarray, order: list[int]
) -> np.ndarray:
    """Optimal Brain Surgeon: rounds one input, lets those left make up for it by the inverse of their own Hessian, goes on."""
    weight, scale, matrix = weight_OI.double().numpy().copy(), scale_OI.double().numpy(), damped(hessian_II)
    low, high = (np.broadcast_to(bound, weight.shape) for bound in (low, high))
    codes = np.zeros(weight.shape, np.int64)
    for step, j in enumerate(order):
        left = order[step:]
        inverse = np.linalg.inv(matrix[np.ix_(left, left)])
        codes[:, j] = np.clip(np.rint(weight[:, j] / scale[:, j]), low[:, j], high[:, j])
        error = (weight[:, j] - codes[:, j] * scale[:, j]) / inverse[0, 0]
        weight[:, left] -= np.outer(error, inverse[0])
    return codes


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "bits"), [(1, 1, 4), (3, 7, 4), (4, 24, 8), (2, 40, 4)])
def test_codes_are_those_of_the_naive_loop(outputs: int, inputs: int, bits: int, act_order: bool) -> None:
    weight_OI, hessian_II = (tensor.double() for tensor in problem(inputs, outputs, inputs, 100))
    high = 2 ** (bits - 1) - 1
    scale_OI = (weight_scale(weight_OI, high)[:, None] * torch.linspace(0.7, 1, inputs)).expand(outputs, inputs)
    diagonal = hessian_II.diagonal()
    order = diagonal.argsort(descending=True, stable=True).tolist() if act_order else list(range(inputs))
    found = gptq(weight_OI, hessian_II, scale_OI, -high - 1, high, act_order=act_order)
    assert found.dtype == torch.int8
    assert np.array_equal(found.numpy(), naive(weight_OI, hessian_II, scale_OI, -high - 1, high, order))


def with_zero_points(weight_OI: Tensor, group_size: int) -> Int4Scales:
    """Returns scales and zero points with which some codes are cut off."""
    scale_OG, zero_OG = group_range(weight_OI, group_size)[:2]
    return Int4Scales(0.8 * scale_OG, group_size, zero_OG)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(1, 1, 1), (3, 7, 4), (4, 24, 8), (2, 40, 16)])
def test_codes_with_zero_points_are_those_of_the_naive_loop(outputs: int, inputs: int, group_size: int, act_order: bool) -> None:
    weight_OI, hessian_II = (tensor.double() for tensor in problem(inputs, outputs, inputs, 100))
    scales = with_zero_points(weight_OI + torch.linspace(-1, 1, inputs), group_size)
    diagonal = hessian_II.diagonal()
    order = diagonal.argsort(descending=True, stable=True).tolist() if act_order else list(range(inputs))
    zero = scales.zero(inputs)
    assert isinstance(zero, Tensor)
    low, high = (bound - zero.numpy().astype(int) for bound in (-8, 7))
    found = gptq(weight_OI, hessian_II, scales.expanded(inputs), *scales.bounds(inputs), act_order=act_order)
    assert np.array_equal(found.numpy(), naive(weight_OI, hessian_II, scales.expanded(inputs), low, high, order))
    assert (found >= torch.from_numpy(low)).all()
    assert (found <= torch.from_numpy(high)).all()


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 20), st.integers(1, 40), st.floats(-2, 2))
@settings(max_examples=30, deadline=None)
def test_with_zero_points_a_zero_stays_and_no_output_gets_worse(seed: int, outputs: int, inputs: int, rows: int, mean: float) -> None:
    weight_OI, hessian_II = problem(seed, outputs, inputs, rows)
    weight_OI = (weight_OI + mean) * (torch.rand(outputs, inputs, generator=torch.Generator().manual_seed(seed)) < 0.7)
    scales = with_zero_points(weight_OI, 8)
    scale_OI, bounds = scales.expanded(inputs), scales.bounds(inputs)
    found_OI, nearest_OI = gptq(weight_OI, hessian_II, scale_OI, *bounds), nearest(weight_OI, scale_OI, *bounds)
    assert not found_OI[weight_OI == 0].any()
    chosen_OI, before, after = better_rows(weight_OI, nearest_OI, found_OI, scale_OI, hessian_II)
    assert after <= before
    assert torch.equal(scales.differences(chosen_OI.float() * scale_OI), chosen_OI)  # on the grid: within the bounds


@pytest.mark.parametrize("inputs", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_blocks_make_no_difference(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI, hessian_II = (tensor.double() for tensor in problem(0, 3, inputs, 2 * inputs))
    scale_OI = weight_scale(weight_OI, 7)[:, None].expand(weight_OI.shape)
    found = gptq(weight_OI, hessian_II, scale_OI, -8, 7)
    monkeypatch.setattr("quantize.rounding.gptq.BLOCK", 10_000)
    assert torch.equal(gptq(weight_OI, hessian_II, scale_OI, -8, 7), found)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 20), st.integers(1, 40), st.sampled_from([1, 3, 7, 127]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_error_is_never_above_that_of_the_nearest(seed: int, outputs: int, inputs: int, rows: int, high: int, act_order: bool) -> None:
    weight_OI, hessian_II = problem(seed, outputs, inputs, rows)
    scale_OI = weight_scale(weight_OI, high)[:, None].expand(weight_OI.shape)
    nearest_OI = quantize(weight_OI, scale_OI, -high, high)
    found_OI = gptq(weight_OI, hessian_II, scale_OI, -high, high, act_order=act_order)
    assert found_OI.abs().max() <= high
    chosen_OI, before, after = better_rows(weight_OI, nearest_OI, found_OI, scale_OI, hessian_II)
    nearest, chosen = (float(output_errors(weight_OI, codes.float() * scale_OI, hessian_II).sum()) for codes in (nearest_OI, chosen_OI))
    assert after == pytest.approx(chosen)
    assert before == pytest.approx(nearest)
    assert chosen <= nearest


@pytest.mark.parametrize("high", [7, 127])
def test_correlated_inputs_gain_much(high: int) -> None:
    weight_OI, hessian_II = problem(1, 20, 60, 300)
    scale_OI = weight_scale(weight_OI, high)[:, None].expand(weight_OI.shape)
    codes = quantize(weight_OI, scale_OI, -high, high), gptq(weight_OI, hessian_II, scale_OI, -high, high)
    nearest, found = (float(output_errors(weight_OI, code.float() * scale_OI, hessian_II).sum()) for code in codes)
    assert found < 0.5 * nearest


def test_inputs_that_were_always_zero_round_to_nearest() -> None:
    weight_OI, hessian_II = problem(2, 5, 12, 50)
    dead = [0, 5, 11]
    hessian_II[dead] = 0
    hessian_II[:, dead] = 0
    scale_OI = weight_scale(weight_OI, 7)[:, None].expand(weight_OI.shape)
    found = gptq(weight_OI, hessian_II, scale_OI, -7, 7)
    assert torch.equal(found[:, dead], quantize(weight_OI, scale_OI, -7, 7)[:, dead])
    assert torch.equal(gptq(weight_OI, torch.zeros(12, 12), scale_OI, -7, 7), quantize(weight_OI, scale_OI, -7, 7))


def test_the_size_of_the_hessian_and_few_rows_do_not_matter() -> None:
    weight_OI, hessian_II = problem(3, 4, 30, 2)  # of rank 2
    scale_OI = weight_scale(weight_OI, 7)[:, None].expand(weight_OI.shape)
    found = gptq(weight_OI, hessian_II, scale_OI, -7, 7)
    assert torch.equal(gptq(weight_OI, 1024 * hessian_II, scale_OI, -7, 7), found)


def test_the_arguments_stay_as_they_are() -> None:
    weight_OI, hessian_II = problem(4, 3, 9, 40)
    scale_OI = weight_scale(weight_OI, 7)[:, None].expand(weight_OI.shape)
    before = weight_OI.clone(), hessian_II.clone()
    gptq(weight_OI, hessian_II, scale_OI, -7, 7, act_order=False)
    assert torch.equal(weight_OI, before[0])
    assert torch.equal(hessian_II, before[1])
