"""Checks norms and their codes against float64, by the bounds that `export.kernels.norm` states."""

import torch
from torch import Tensor

from export.kernels.norm import Norm


def exact_and_bound(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Returns the norm of float32 rows in float64, and the bound that the docstring of the kernel states."""
    h, gain = h.double(), norm.gain.double()
    bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.double()
    centred = h - h.mean(dim=1, keepdim=True) if norm.centred else h
    spread = (centred.square().mean(dim=1, keepdim=True) + torch.tensor(norm.eps).double()).sqrt()
    z0, largest = centred / spread, h.abs().amax(dim=1, keepdim=True) / spread
    return z0 * gain + bias, 48 * 2.0**-24 * (gain.abs() * (1 + z0.abs()) * (1 + largest) + bias.abs())


def check_rows(codes: Tensor, scales: Tensor, exact: Tensor, bound: Tensor, given: bool) -> Tensor:
    """Checks scales, and codes where the exact value is away from a tie; returns which are near one."""
    if not given:
        wanted = (exact.abs().amax(dim=1, keepdim=True) / 127).clamp(min=2.0**-63)
        most = bound.amax(dim=1, keepdim=True)
        assert ((scales.double() - wanted).abs() <= most / 127 + 2.0**-23 * wanted).all()
        assert (codes.abs().amax(dim=1) == 127).all()
    steps, slack = exact / scales.double(), bound / scales.double() + 2.0**-15
    near = (steps - steps.floor() - 0.5).abs() <= slack
    rounded = steps.round().clamp(-128 if given else -127, 127)
    assert torch.equal(codes.double()[~near], rounded[~near])
    assert ((codes.double() - rounded).abs() <= 1 + slack).all()
    return near
