"""Residual, norm and quantization: the sum is torch's to the bit, the norm within its bound of float64, codes exact but for near ties."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.gpu import references
from export.kernels.norm import Norm
from foundation.core.errors import InputError
from tests.export.kernels.calls import norm_quantize
from tests.export.kernels.rows_near_ties import check_rows, exact_and_bound

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]


@given(
    st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 31, 33, 127, 128, 384, 769, 2049])),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.03]),
    st.sampled_from(["sum", "norm"]),
    st.sampled_from([0.0, 30.0, -1000.0]),
    st.integers(0, 999),
)
@settings(max_examples=10)
@example((3, 384), torch.float32, True, True, None, "norm", 1000.0, 0)
@example((3, 384), torch.float16, False, False, 0.03, "sum", 0.0, 0)
def test_against_float64(
    interpreted: Interpreted, shape: tuple[int, int], dtype: torch.dtype, residual: bool, centred: bool, scale: float | None, keep: Any,
    mean: float, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    x, r = (torch.randn(shape) + mean).to(dtype), torch.randn(shape).to(dtype) if residual else None
    norm = Norm(1 + torch.randn(shape[1]) * 0.3, torch.randn(shape[1]) if centred else None, 1e-5, centred)
    codes, scales, kept = interpreted(norm_quantize, x, r, norm, scale, keep)
    h = x.float() + (0 if r is None else r.float())
    exact, bound = exact_and_bound(h, norm)
    if keep == "sum" and dtype == torch.bfloat16:  # to which the interpreter cuts, where the GPU rounds
        torch.testing.assert_close(kept.float(), h, rtol=2.0**-7, atol=0)
    elif keep == "sum":
        assert torch.equal(kept, h.to(dtype))
    else:
        assert ((kept.double() - exact).abs() <= bound + torch.finfo(dtype).eps * (exact.abs() + bound)).all()
    check_rows(codes, scales, exact, bound, given=scale is not None)


def test_the_bound_excuses_few_codes(interpreted: Interpreted) -> None:
    x, norm = torch.randn(50, 768), Norm(torch.ones(768), torch.zeros(768), 1e-12)
    codes, scales, _ = interpreted(norm_quantize, x, None, norm, 0.03, "norm")
    exact, bound = exact_and_bound(x, norm)
    assert check_rows(codes, scales, exact, bound, given=True).double().mean() < 0.01
    torch.testing.assert_close(codes, references.norm(x, None, norm, 0.03, "norm")[0], rtol=0, atol=1)


def test_ties_go_to_even_and_ends_saturate(interpreted: Interpreted) -> None:
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])  # its norm is x, as eps vanishes beside 1
    norm = Norm(torch.tensor([2.5, 3.5, 900.0, 900.0]), None, 1e-12)
    assert interpreted(norm_quantize, x, None, norm, 1.0, "norm")[0].tolist() == [[2, -4, 127, -128]]


def test_rows_of_zeros(interpreted: Interpreted) -> None:
    norm = Norm(torch.ones(5), None, 1e-12, centred=False)
    codes, scales, kept = interpreted(norm_quantize, torch.zeros(2, 5), None, norm, None, "norm")
    assert not codes.any()
    assert not kept.any()
    assert scales.flatten().tolist() == [2.0**-63] * 2


def test_wrong_input_is_refused() -> None:
    for eps in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"eps: .* given; a positive number"):
            Norm(torch.ones(4), None, eps)
    with pytest.raises(InputError, match="1 to 16384"):
        Norm(torch.ones(16385), None, 1e-5)
