"""Weights that are 0 stay 0 when weights are rounded by the error of the outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foundation.schemes.int8 import LayerScales, levels, weight_scale
from quantize.moments import output_errors
from quantize.rounding.adaround import adaround
from quantize.rounding.gptq import gptq
from quantize.rounding.rounding import round_weight


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight of which half is 0, the Hessian of correlated inputs, and scales of four bits."""
    generator = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(100, 24, generator=generator) @ (torch.randn(24, 24, generator=generator) + torch.eye(24))
    weight_OI = torch.randn(6, 24, generator=generator) * (torch.rand(6, 24, generator=generator) < 0.5)
    return weight_OI, x_NI.T @ x_NI / 100, weight_scale(weight_OI, 7)[:, None].expand(6, 24)


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq(act_order: bool) -> None:
    weight_OI, hessian_II, scale_OI = problem(0)
    codes_OI = gptq(weight_OI, hessian_II, scale_OI, -7, 7, act_order=act_order)
    nearest_OI = (weight_OI / scale_OI).round()
    assert bool((codes_OI[weight_OI == 0] == 0).all())
    assert not torch.equal(codes_OI.float(), nearest_OI)
    errors = [float(output_errors(weight_OI, codes * scale_OI, hessian_II).sum()) for codes in (codes_OI.float(), nearest_OI)]
    assert errors[0] < errors[1]  # the others still make up for each other


def test_adaround() -> None:
    """Weights beyond the range all lose the same way, and inputs that say the same could make up for it."""
    weight_OI = torch.tensor([[0.0, 1.3, *[3.4] * 8]])
    codes_OI = adaround(weight_OI, torch.ones(10, 10) + 0.01 * torch.eye(10), torch.ones(1, 10), -3, 3, steps=300)
    assert codes_OI.tolist() == [[0, 2, *[3] * 8]]


@pytest.mark.parametrize("method", ["nearest", "gptq", "adaround"])
def test_layers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantize.rounding.rounding.adaround", lambda *given: adaround(*given, steps=50))
    weight_OI, hessian_II, _ = problem(2)
    scales = LayerScales(weight_scale(weight_OI, levels(8)), torch.tensor(0.1), 8, torch.linspace(0.5, 2, 24))
    rounded_OI, _ = round_weight(weight_OI, scales, hessian_II, method)  # type: ignore[arg-type]
    assert bool((rounded_OI[weight_OI == 0] == 0).all())
