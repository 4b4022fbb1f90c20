"""The arithmetic of training in int8: integers against a naive loop, gradients against written-out surrogates."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundation.schemes.int8 import levels, quantize
from quantize.training.linear import Int8Function
from quantize.training.straight_through import Int8Arithmetic, codes_and_slope, only_inside

LOW, HIGH = -128, 127


class Problem(NamedTuple):
    """Arguments of `Int8Function`, and the gradient of its output."""

    x_NI: Tensor
    weight_OI: Tensor
    input_scale: Tensor
    weight_scale_O: Tensor
    bias_O: Tensor
    largest: int
    gradient_NO: Tensor


def problem(rows: int, inputs: int, outputs: int, bits: int = 8, seed: int = 0) -> Problem:
    """Draws values of which about one in ten is clipped, at either end."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    scale_O = (0.8 + torch.rand(outputs, generator=generator)) * 1.2 / levels(bits)
    bias, gradient = torch.randn(outputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    return Problem(x, weight, torch.tensor(1.6 / HIGH), scale_O, bias, levels(bits), gradient)


def int8(
    x: Tensor,
    weight_OI: Tensor,
    input_scale: Tensor,
    weight_scale_O: Tensor,
    bias_O: Tensor | None,
    largest: int = 127,
    pact: bool = False,
    products: torch.dtype = torch.float32,
    computed: bool = False,
) -> Tensor:
    return Int8Function.apply(
        x, weight_OI, input_scale, weight_scale_O, bias_O, None, Int8Arithmetic(largest, pact, products, None, computed)
    )


def gradients(case: Problem, pact: bool = False, products: torch.dtype = torch.float32) -> list[Tensor]:
    """Gradients of x, W, the input scale, the weight scales and the bias."""
    leaves = [value.clone().requires_grad_() for value in case[:5]]
    int8(*leaves, case.largest, pact, products).backward(case.gradient_NO)
    found = [leaf.grad for leaf in leaves]
    assert all(value is not None for value in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_models_may_change_the_output_in_place(shape: tuple[int, ...], products: torch.dtype) -> None:
    """Longformer of Transformers divides its queries in place."""
    case = problem(6, 5, 4)
    expected = gradients(case, products=products)
    leaves = [value.clone().requires_grad_() for value in case[:5]]
    y = int8(leaves[0].reshape(*shape, 5), *leaves[1:], case.largest, False, products)
    assert y.shape == (*shape, 4)
    y *= 2
    y.backward(case.gradient_NO.reshape(y.shape).to(y.dtype) / 2)
    for leaf, one in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, one)


def slope_of(v: float, low: int, high: int, pact: bool) -> float:
    """Equation 3 of LSQ, and what PACT has in its place."""
    if v <= low:
        return low
    if v >= high:
        return high
    return 0.0 if pact else -v + float(np.rint(v))


def written_out(case: Problem, pact: bool) -> list[np.ndarray]:
    """The gradients, one element at a time in float64; v and the codes are those of float32."""
    x, weight, gradient = (value.double().numpy() for value in (case.x_NI, case.weight_OI, case.gradient_NO))
    v_x, v_w = (case.x_NI / case.input_scale).numpy(), (case.weight_OI / case.weight_scale_O[:, None]).numpy()
    s_x, s_w = float(case.input_scale), case.weight_scale_O.double().numpy()
    x_hat = s_x * np.clip(np.rint(v_x), LOW, HIGH).astype(np.float64)
    weight_hat = s_w[:, None] * np.clip(np.rint(v_w), -case.largest, case.largest).astype(np.float64)
    d_x, d_weight, d_s_x, d_s_w = np.zeros_like(x), np.zeros_like(weight), 0.0, np.zeros_like(s_w)
    for n in range(x.shape[0]):
        for i in range(x.shape[1]):
            through = sum(gradient[n, o] * weight_hat[o, i] for o in range(len(weight)))
            d_x[n, i] = through if LOW < v_x[n, i] < HIGH else 0.0
            d_s_x += through * slope_of(float(v_x[n, i]), LOW, HIGH, pact) / math.sqrt(x.shape[1] * HIGH)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            through = sum(gradient[n, o] * x_hat[n, i] for n in range(len(x)))
            d_weight[o, i] = through if -case.largest < v_w[o, i] < case.largest else 0.0
            d_s_w[o] += through * slope_of(float(v_w[o, i]), -case.largest, case.largest, False) / math.sqrt(x.shape[1] * case.largest)
    return [d_x, d_weight, np.array(d_s_x), d_s_w, gradient.sum(axis=0)]


def assert_close(found: list[Tensor], expected: list[Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        b = np.asarray(b, np.float64)
        assert a.shape == b.shape
        size = float(np.sqrt(np.mean(b**2))) if b.size else 0.0
        np.testing.assert_allclose(a.numpy(), b, rtol=tolerance, atol=tolerance * (size + 1e-2))  # a sum of terms near 1 may be near 0


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    size=st.sampled_from([1, 100, 1e6]),
    seed=st.integers(0, 99),
)
def test_accumulators_are_those_of_a_naive_loop(n: int, inputs: int, outputs: int, size: float, seed: int) -> None:
    """Scales of 1 leave the int32 sums as they are; float32 holds those of so few inputs exactly."""
    random = np.random.default_rng(seed)
    x, weight = (random.normal(0, size, shape).astype(np.float32) for shape in ((n, inputs), (outputs, inputs)))
    y = int8(torch.from_numpy(x), torch.from_numpy(weight), torch.tensor(1.0), torch.ones(outputs), None)
    q_x, q_w = np.clip(np.rint(x), LOW, HIGH).astype(np.int64), np.clip(np.rint(weight), -127, 127).astype(np.int64)
    expected = np.zeros((n, outputs), np.int64)
    for i in range(inputs):
        expected += q_x[:, i, None] * q_w[None, :, i]
    assert y.dtype == torch.float32
    assert np.array_equal(y.numpy(), expected)


@pytest.mark.parametrize("value", [1e9, -1e9])
@pytest.mark.parametrize("inputs", [1, 31, 33, 1025])
def test_saturated_codes_never_wrap(value: float, inputs: int) -> None:
    x, weight = torch.full((2, inputs), value), torch.full((3, inputs), -1e9)
    y = int8(x, weight, torch.tensor(1.0), torch.ones(3), None)
    assert torch.equal(y, torch.full((2, 3), float((HIGH if value > 0 else LOW) * -127 * inputs)))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 6), st.integers(1, 9), st.integers(1, 6), st.sampled_from([7, 8]), st.booleans(), st.integers(0, 99))
def test_gradients_are_those_written_out(rows: int, inputs: int, outputs: int, bits: int, pact: bool, seed: int) -> None:
    case = problem(rows, inputs, outputs, bits, seed)
    assert_close(gradients(case, pact), written_out(case, pact))


@pytest.mark.parametrize("bits", [7, 8])
def test_gradients_are_finite_differences_of_the_surrogate(bits: int) -> None:
    """Straight-through means: the distance of rounding stands still. x^ = s * (clip(x / s) + distance) is then piecewise smooth."""
    case = problem(7, 11, 5, bits)
    limits = [(LOW, HIGH), (-case.largest, case.largest)]

    def clipped(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        return (values / scale).clamp(low, high)

    columns = [case.input_scale, case.weight_scale_O[:, None]]
    distances = []
    for values, scale, (low, high) in zip(case[:2], columns, limits, strict=True):
        v = clipped(values, scale, low, high)
        distances.append((torch.round(v) - v).double())

    def loss(x: Tensor, weight: Tensor, s_x: Tensor, s_w: Tensor, bias: Tensor) -> float:
        x_hat = s_x * (clipped(x, s_x, *limits[0]) + distances[0])
        weight_hat = s_w[:, None] * (clipped(weight, s_w[:, None], *limits[1]) + distances[1])
        return float(((x_hat @ weight_hat.T + bias) * case.gradient_NO).sum())

    arguments = [value.double() for value in case[:5]]
    differences = []
    for argument in arguments:
        flat, difference = argument.view(-1), torch.zeros(argument.numel(), dtype=torch.float64)
        for i in range(len(flat)):
            before, h = flat[i].item(), 1e-7
            flat[i] = before + h
            above = loss(*arguments)  # type: ignore[arg-type]
            flat[i] = before - h
            difference[i] = (above - loss(*arguments)) / (2 * h)  # type: ignore[arg-type]
            flat[i] = before
        differences.append(difference.view(argument.shape))
    differences[2] /= math.sqrt(11 * HIGH)
    differences[3] /= math.sqrt(11 * case.largest)
    for values, scale, (low, high) in zip(case[:2], columns, limits, strict=True):  # so that both pieces are seen, and no kink
        v = values / scale
        assert (v < low).any()
        assert (v > high).any()
        assert torch.minimum((v - low).abs(), (v - high).abs()).min() > 1e-3
    assert_close(gradients(case), [value.numpy() for value in differences], 2e-4)


@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-63, 63)])
@pytest.mark.parametrize("lsq", [None, torch.float32, torch.bfloat16])
def test_only_values_at_or_beyond_a_limit_are_outside(low: int, high: int, lsq: torch.dtype | None) -> None:
    v = torch.tensor(
        [0.0, 0.5, 1.5, -2.5, high - 0.6, high - 0.5, high - 0.3, high, high + 0.3, high + 9, low + 0.4, low, low - 0.2, low - 70]
    )
    inside = torch.tensor([True] * 7 + [False] * 3 + [True] + [False] * 3)
    for scale in (1.0, 0.25):  # powers of two: v comes back exactly
        codes, slope = codes_and_slope(v * scale, torch.tensor(scale), low, high, lsq)
        assert torch.equal(codes, quantize(v * scale, torch.tensor(scale), low, high))
        assert codes[6] == codes[7] == high  # one is inside, one is outside: codes cannot tell
        assert torch.equal(only_inside(torch.ones(len(v)), slope.float(), -1, 1).bool(), inside)
        assert slope.dtype == (torch.int8 if lsq is None else lsq)
        expected = torch.tensor([slope_of(float(value), low, high, lsq is None) for value in v])
        torch.testing.assert_close(slope.float(), expected, rtol=0, atol=2e-3 if lsq == torch.bfloat16 else 1e-5)


def test_products_in_bfloat16_have_the_same_integers_and_close_gradients() -> None:
    case = problem(64, 48, 40)
    exact, expected = int8(*case[:6]), gradients(case)
    y = int8(*case[:6], products=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
    found = gradients(case._replace(gradient_NO=case.gradient_NO.bfloat16()), products=torch.bfloat16)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(("pact", "most"), [(False, 3), (True, 2)])
def test_what_is_kept_for_backward_is_small(pact: bool, most: int) -> None:
    """Input and weight themselves; codes and slopes of a weight that nobody else holds. With PACT weights have no learned scale."""
    case, kept = problem(64, 48, 40), []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    leaves = [value.clone().requires_grad_(not (pact and i == 3)) for i, value in enumerate(case[:5])]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        int8(*leaves, 127, pact, torch.bfloat16)
    assert {value.data_ptr() for value in kept} == {leaf.data_ptr() for leaf in leaves[:4]}
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        int8(*leaves, 127, pact, torch.bfloat16, computed=True)
    held = {leaf.data_ptr() for leaf in (leaves[0], *leaves[2:4])}
    assert sum(value.nbytes for value in kept if value.data_ptr() not in held) == most * 40 * 48


@pytest.mark.parametrize("pact", [False, True])
def test_a_weight_that_is_kept_as_codes_has_the_same_gradients(pact: bool) -> None:
    case = problem(9, 7, 5)
    for products in (torch.float32, torch.bfloat16):
        found = []
        for computed in (False, True):
            leaves = [value.clone().requires_grad_() for value in case[:5]]
            int8(*leaves, case.largest, pact, products, computed=computed).backward(case.gradient_NO.to(products))
            found.append([leaf.grad for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_smoothing_within_the_layer_is_smoothing_before_it(products: torch.dtype) -> None:
    """The same bits as a layer without smoothing that reads x / s and W * s."""
    case, fixed = problem(9, 7, 5), Int8Arithmetic(127, False, products)
    smooth_I = 0.5 + torch.rand(7, generator=torch.Generator().manual_seed(0))
    inside, outside = ([value.clone().requires_grad_() for value in case[:5]] for _ in range(2))
    inside[0], outside[0] = (case.x_NI.to(products).requires_grad_() for _ in range(2))
    y = Int8Function.apply(*inside, smooth_I, fixed)
    x, weight, *rest = outside
    expected = Int8Function.apply(x.float() * smooth_I.reciprocal(), weight * smooth_I, *rest, None, fixed)
    assert torch.equal(y, expected)
    for result in (y, expected):
        result.backward(case.gradient_NO.to(products))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inside, outside, strict=True))  # type: ignore[arg-type]


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    case = problem(4, 3, 2)
    x = case.x_NI.clone().requires_grad_()
    int8(x, *case[1:4], None).backward(case.gradient_NO)
    assert_close([x.grad], [written_out(case, False)[0]])  # type: ignore[list-item]
