"""Rounding in a model: layers beside the float ones, every scheme of integers, smoothing, and the errors that are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from compress.schemes.int4 import Int4Scales, group_scale
from compress.schemes.int8 import DynamicScales, LayerScales, weight_scale
from quantize.rounding import IntegerScales, round_layers, round_weight, with_weight

pytestmark = pytest.mark.whole

INPUT = torch.tensor(0.05)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(20, 6), nn.Linear(20, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.relu(self.a(x) + self.b(x)))
        return y


def layers_of(net: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in net.named_children() if isinstance(layer, nn.Linear)}


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(200, 20, generator=generator) @ torch.randn(20, 20, generator=generator)


def batches() -> Iterator[dict[str, Tensor]]:
    yield from ({"x": part} for part in rows().split(64))


def send(model: nn.Module, features: Mapping[str, Tensor]) -> object:
    return model(features["x"])


def scales_of(scheme: str, weight: Tensor, smooth: Tensor | None = None) -> IntegerScales:
    smoothed = weight if smooth is None else weight * smooth
    match scheme:
        case "w8a8":
            return LayerScales(weight_scale(smoothed, 63), INPUT, 7, smooth)
        case "w8a8-dynamic":
            return DynamicScales(weight_scale(smoothed, 127), 8, smooth)
    return Int4Scales(group_scale(weight, 8), 8)


def rounded(scheme: str, method: str, smooth: bool = False) -> tuple[Net, dict[str, IntegerScales], dict[str, nn.Linear], list[dict]]:
    net = Net()
    layers = layers_of(net)
    vectors = {name: torch.linspace(0.5, 2, 20) if smooth and name != "c" else None for name in layers}
    scales = {name: scales_of(scheme, layer.weight.detach(), vectors[name]) for name, layer in layers.items()}
    found, figures = round_layers(net, layers, scales, method, [["a", "b"], ["c"]], batches, send)  # type: ignore[arg-type]
    return net, scales, found, figures


def error(net: Net, layer: nn.Linear, name: str) -> float:
    with torch.no_grad():
        x = rows() if name != "c" else torch.relu(net.a(rows()) + net.b(rows()))
        exact = nn.functional.linear(x.double(), layers_of(net)[name].weight.double())
        return float((nn.functional.linear(x.double(), layer.weight.double()) - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("method", ["gptq", "adaround"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-dynamic", "w4a16"])
def test_outputs_err_less_than_by_rounding_to_nearest(scheme: str, method: str, smooth: bool) -> None:
    if scheme == "w4a16" and smooth:
        return
    net, scales, found, figures = rounded(scheme, method, smooth)
    assert [figure["name"] for figure in figures] == ["a", "b", "c"] == list(found)
    for figure in figures:
        name = figure["name"]
        on_grid = scales[name].on_grid(found[name].weight.detach())
        torch.testing.assert_close(on_grid, found[name].weight.detach(), rtol=1e-6, atol=0)  # the codes are those that were chosen
        nearest = with_weight(net.a, scales[name].on_grid(layers_of(net)[name].weight.detach()))
        assert figure["error"] == pytest.approx(error(net, found[name], name), rel=1e-3)
        assert figure["error_nearest"] == pytest.approx(error(net, nearest, name), rel=1e-3)
        assert figure["error"] <= figure["error_nearest"]
    assert figures[0]["error"] < 0.8 * figures[0]["error_nearest"]


def test_the_float_model_stays_and_biases_are_shared() -> None:
    net, _, found, _ = rounded("w4a16", "gptq")
    for (name, layer), before in zip(layers_of(net).items(), layers_of(Net()).values(), strict=True):
        assert torch.equal(layer.weight, before.weight)
        assert found[name].bias is layer.bias


def test_nearest_is_what_the_scales_do() -> None:
    weight, scales = Net().a.weight.detach(), scales_of("w4a16", Net().a.weight.detach())
    found, errors = round_weight(weight, scales, torch.eye(20), "nearest")
    assert torch.equal(found, scales.on_grid(weight))
    assert errors["error"] == errors["error_nearest"] > 0


def test_a_layer_whose_input_was_always_zero_errs_by_nothing() -> None:
    weight = Net().a.weight.detach()
    found, errors = round_weight(weight, scales_of("w8a8", weight), torch.zeros(20, 20), "gptq")
    assert (errors["error"], errors["error_nearest"]) == (0, 0)
    assert torch.equal(found, scales_of("w8a8", weight).on_grid(weight))
