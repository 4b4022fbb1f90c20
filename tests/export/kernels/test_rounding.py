"""Codes without a division are those of IEEE division, to the bit: around every tie, for scales at neighbours of powers of two."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import requantization
from benchmarks.gpu.references import quantized
from benchmarks.gpu.requantization import chunks, counted
from export.kernels.attention import Scores
from export.kernels.epilogue import Output
from export.kernels.qkv import Heads
from foundation.core.errors import InputError
from tests.export.kernels.calls import quantize_tensor

Interpreted = Callable[..., Any]
ENDS = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45, 2.0**-126])


def around_ties(scale: float) -> Tensor:
    """Returns every tie of a scale from -130.5 to 130.5 with the three floats on either side, and what is far out."""
    ties = torch.arange(-261, 262, 2).double() / 2 * float(np.float32(scale))
    bits = ties.float().view(torch.int32)
    return torch.cat([*((bits + nudge).view(torch.float32) for nudge in range(-3, 4)), ENDS])


@given(st.floats(2.0**-63, 2.0**120, width=32), st.integers(0, 999))
@settings(max_examples=30)
def test_codes_are_those_of_ieee_division(interpreted: Interpreted, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.cat([around_ties(scale), torch.randn(200) * 60 * scale])
    assert torch.equal(interpreted(quantize_tensor, x, scale), quantized(x, scale))


@pytest.mark.parametrize("exponent", [-63, -10, 0, 119])
def test_scales_beside_powers_of_two_round_the_same(interpreted: Interpreted, exponent: int) -> None:
    ends = np.float32(2.0**exponent), np.float32(2.0 ** (exponent + 1))
    inner = np.nextafter(ends[0], ends[1]), np.nextafter(ends[1], ends[0]), np.float32(1.9921875 * 2.0**exponent)
    for scale in map(float, (*ends, *inner)):
        x = around_ties(scale)
        assert torch.equal(interpreted(quantize_tensor, x, scale), quantized(x, scale))


def test_the_sum_of_a_gemm_at_every_tie_of_its_scale_rounds_as_division(interpreted: Interpreted) -> None:
    sums = torch.arange(-(2**16), 2**16, dtype=torch.float32)  # with a scale of 2 n, every n-th odd sum is a tie
    for scale in (2.0, 6.0, 254.0, 1022.0, 0.7):
        found = interpreted(quantize_tensor, sums, scale)
        assert torch.equal(found, quantized(sums, scale))


def test_one_correction_suffices_and_none_does_not() -> None:
    found = counted(chunks(2**14 - 1))
    assert found.quotients == 513 * requantization.TIES * 7
    assert found.corrected == 0
    assert found.reciprocal_alone > 0.03 * found.quotients


@pytest.mark.parametrize("scale", [2.0**-64, 0.0, -1.0, float("nan"), float("inf"), 2.0**121])
def test_scales_that_the_proof_does_not_cover_are_refused(scale: float) -> None:
    makes: list[Callable[[], object]] = [
        lambda: Output(scale=scale),
        lambda: Scores(1.0, out_scale=scale),
        lambda: Heads(1, 1, 32, query_scale=scale),
        lambda: quantize_tensor(torch.ones(1), scale),
    ]
    for make in makes:
        with pytest.raises(InputError) as raised:
            make()
        assert str(scale) in str(raised.value)
