"""Folded batch norms against the norm written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantize.batch_norm import Shift, find_pairs, fold_batch_norms, return_biases


def forward(model: nn.Module, features: Mapping[str, Tensor]) -> Any:
    return model(features["x"])


def trained_norm(channels: int, axes: int = 2, **keys: Any) -> nn.BatchNorm1d | nn.BatchNorm2d:
    norm = (nn.BatchNorm1d, nn.BatchNorm2d)[axes - 1](channels, **keys)
    generator = torch.Generator().manual_seed(0)
    norm.running_mean = torch.randn(channels, generator=generator)
    norm.running_var = torch.rand(channels, generator=generator) * 3 + 0.01
    if norm.affine:
        norm.weight.data = torch.randn(channels, generator=generator)  # of both signs
        norm.bias.data = torch.randn(channels, generator=generator)
    return norm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("affine", [False, True])
def test_a_folded_norm_computes_what_the_norm_computed(bias: bool, axes: int, affine: bool) -> None:
    torch.manual_seed(1)
    layer = (nn.Conv1d, nn.Conv2d)[axes - 1](4, 6, 3, groups=2, bias=bias)
    norm = trained_norm(6, axes, affine=affine, eps=1e-3)
    x = torch.randn(3, 4, *[7] * axes)
    y, shape = layer(x).detach(), (-1, *[1] * axes)
    gain, shift = (norm.weight, norm.bias) if affine else (torch.ones(6), torch.zeros(6))
    deviation = (norm.running_var + 1e-3).sqrt()
    expected = (y - norm.running_mean.reshape(shape)) / deviation.reshape(shape) * gain.reshape(shape) + shift.reshape(shape)
    model = nn.Sequential(layer, norm, nn.ReLU()).eval()
    pairs = fold_batch_norms(model, ["0"], {"x": x}, forward)
    assert pairs == {"0": "1"}
    assert isinstance(model[1], Shift)
    torch.testing.assert_close(model(x), expected.relu(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    before = model(x)
    return_biases(model, pairs)
    assert (layer.bias is not None) == bias
    assert torch.equal(model[1].bias.any(), torch.tensor(not bias))
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)  # a bias is added inside the sum of the convolution, or after it


def test_the_stock_norm_only_adds_what_is_stored() -> None:
    """Bit for bit, so that a checkpoint read by Transformers computes the same."""
    for eps in (1e-5, 1e-3, 1e-12, 1.1e-5, 3.3e-6):
        model = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), trained_norm(5, eps=eps)).eval()
        before = set(model.state_dict())
        x = torch.randn(2, 3, 4, 4)
        return_biases(model, fold_batch_norms(model, ["0"], {"x": x}, forward))
        stock = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), nn.BatchNorm2d(5, eps=eps)).eval()
        assert set(model.state_dict()) == before
        stock.load_state_dict(model.state_dict())
        assert torch.equal(stock(x), model(x))
        assert torch.equal(stock(x), stock[0](x) + stock[1].bias[:, None, None])


def test_a_folded_norm_stays_fixed_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), trained_norm(5)).eval()
    x = torch.randn(2, 3, 4, 4)
    fold_batch_norms(model, ["0"], {"x": x}, forward)
    expected = model(x)
    assert torch.equal(model.train()(x), expected)
    model(x).sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is not None] == ["0.weight", "0.bias"]


class Branches(nn.Module):
    """A convolution and a norm, with something else around them."""

    def __init__(self, run: Callable[[Branches, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 3, 1), trained_norm(3), trained_norm(3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def read_twice(model: Branches, x: Tensor) -> Tensor:
    y = model.conv(x)
    return model.norm(y) + y


def two_norms(model: Branches, x: Tensor) -> Tensor:
    y = model.conv(x)
    return model.norm(y) + model.other(y)


def something_between(model: Branches, x: Tensor) -> Tensor:
    return model.norm(model.conv(x).relu())


def norm_of_two(model: Branches, x: Tensor) -> Tensor:
    return model.norm(model.conv(x)) + model.norm(x)


@pytest.mark.parametrize("run", [read_twice, two_norms, something_between, norm_of_two])
def test_a_norm_that_others_depend_on_stays(run: Callable[[Branches, Tensor], Tensor]) -> None:
    model, x = Branches(run).eval(), torch.randn(2, 3, 4, 4)
    before = model(x)
    assert fold_batch_norms(model, ["conv"], {"x": x}, forward) == {}
    assert torch.equal(model(x), before)


def test_a_pair_that_runs_twice_is_folded_once() -> None:
    model, x = Branches(lambda model, x: model.norm(model.conv(model.norm(model.conv(x))))).eval(), torch.randn(2, 3, 4, 4)
    before = model(x)
    assert fold_batch_norms(model, ["conv"], {"x": x}, forward) == {"conv": "norm"}
    torch.testing.assert_close(model(x), before)


def test_only_norms_of_the_given_layers_with_statistics_are_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), trained_norm(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)).eval()
    x = torch.randn(2, 3, 4, 4)
    assert find_pairs(model, ["2"], {"x": x}, forward) == {}
    assert find_pairs(model, ["0", "2"], {"x": x}, forward) == {"0": "1"}
    shared = nn.Conv2d(3, 3, 1)
    tied = nn.Sequential(shared, trained_norm(3), nn.Conv2d(3, 3, 1)).eval()
    tied[2].weight = shared.weight
    assert find_pairs(tied, ["0", "2"], {"x": x}, forward) == {}
