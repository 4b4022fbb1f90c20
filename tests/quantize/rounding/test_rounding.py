"""Rounding in a model: layers beside the float ones, every scheme of integers, smoothing, and the errors that are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.schemes.int4 import HIGH, LOW, GroupScales, Int4Scales, group_range, group_scale
from foundation.schemes.int8 import DynamicScales, LayerScales, weight_scale
from foundation.schemes.int8_weights import WeightScales
from quantize.choices import Rounding
from quantize.group_scales import Groups
from quantize.rounding.adaround import adaround
from quantize.rounding.gptq import gptq
from quantize.rounding.rounding import IntegerScales, blocks, round_layers, round_weight, with_weight

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
        case "w8a16":
            return WeightScales(weight_scale(weight, 127))
        case "w4a16, zero points":
            scale, zero_point = group_range(weight, 8)[:2]
            return Int4Scales(scale, 8, zero_point)
        case "w4a16, two_level" | "w4a16, k_quant":
            kind: GroupScales = "two_level" if scheme.endswith("two_level") else "k_quant"
            return Int4Scales.of_grid(Groups(8, symmetric=False, scales=kind).grid(weight), 8)
    return Int4Scales(group_scale(weight, 8), 8)


def rounded(scheme: str, method: str, smooth: bool = False) -> tuple[Net, dict[str, IntegerScales], dict[str, nn.Linear], list[dict]]:
    net = Net()
    layers = layers_of(net)
    vectors = {name: torch.linspace(0.5, 2, 20) if smooth and name != "c" else None for name in layers}
    scales = {name: scales_of(scheme, layer.weight.detach(), vectors[name]) for name, layer in layers.items()}
    found, figures = round_layers(net, layers, scales, method, [["a", "b"], ["c"]], batches, send)  # type: ignore[arg-type]
    return net, scales, found, figures


def error(net: Net, layer: nn.Linear, name: str, before: Mapping[str, nn.Linear]) -> float:
    """The error over what the layers before it give with their rounded weights."""
    with torch.no_grad():
        x = rows() if name != "c" else torch.relu(before["a"](rows()) + before["b"](rows()))
        exact = nn.functional.linear(x.double(), layers_of(net)[name].weight.double())
        return float((nn.functional.linear(x.double(), layer.weight.double()) - exact).square().sum() / exact.square().sum())


@pytest.mark.first(1)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("method", ["gptq", "adaround"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-dynamic", "w8a16", "w4a16", "w4a16, zero points", "w4a16, two_level", "w4a16, k_quant"])
def test_outputs_err_less_than_by_rounding_to_nearest(scheme: str, method: str, smooth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantize.rounding.rounding.adaround", partial(adaround, steps=300))  # of 1000
    if "a16" in scheme and smooth:
        return
    net, scales, found, figures = rounded(scheme, method, smooth)
    assert [figure["name"] for figure in figures] == ["a", "b", "c"] == list(found)
    for figure in figures:
        name = figure["name"]
        on_grid = scales[name].on_grid(found[name].weight.detach())
        torch.testing.assert_close(on_grid, found[name].weight.detach(), rtol=1e-6, atol=0)  # the codes are those that were chosen
        nearest = with_weight(net.a, scales[name].on_grid(layers_of(net)[name].weight.detach()))
        assert figure["error"] == pytest.approx(error(net, found[name], name, found), rel=1e-3)
        assert figure["error_nearest"] == pytest.approx(error(net, nearest, name, found), rel=1e-3)
        assert figure["error"] <= figure["error_nearest"]
    assert figures[0]["error"] < 0.8 * figures[0]["error_nearest"]


class Blocks(nn.Module):
    """Blocks of two layers with a sum around them, in a list, and a layer behind the list."""

    def __init__(self, seed: int, depth: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(depth))
            self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = x + block["down"](torch.relu(block["up"](x)))  # type: ignore[index]
        y: Tensor = self.head(x)
        return y


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from(["gptq", "adaround"]))
def test_every_block_is_rounded_for_what_the_rounded_blocks_before_it_give(seed: int, depth: int, method: Rounding) -> None:
    """Against the same written out: all inputs of a block by its float weights, then its rounded weights for the next one."""
    net, x = Blocks(seed, depth).requires_grad_(False), torch.randn(40, 8, generator=torch.Generator().manual_seed(seed))
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    scales = {name: scales_of("w4a16", layer.weight.detach()) for name, layer in layers.items()}
    kwargs = {"steps": 10} if method == "adaround" else {}
    with patch("quantize.rounding.adaround.adaround.__kwdefaults__", {"steps": 10}):
        found, _ = round_layers(net, layers, scales, method, [[name] for name in layers], lambda: [{"x": x}], send)

        def by_hand(name: str, read: Tensor) -> nn.Linear:
            weight_OI, scale_OI = layers[name].weight.detach(), scales[name].expanded(read.shape[1])  # type: ignore[union-attr]
            hessian_II = read.T @ read / len(read)
            method_of = {"gptq": gptq, "adaround": adaround}[method]
            codes_OI = method_of(weight_OI, hessian_II, scale_OI, LOW, HIGH, **kwargs).float()  # type: ignore[operator]
            nearest_OI = (weight_OI / scale_OI).round().clamp(LOW, HIGH)
            errors = [((weight_OI - codes * scale_OI).double() @ read.double().T).square().sum(1) for codes in (nearest_OI, codes_OI)]
            return with_weight(layers[name], torch.where((errors[1] < errors[0])[:, None], codes_OI, nearest_OI) * scale_OI)

        y = x
        for number in range(depth):
            up, down = (f"body.{number}.{name}" for name in ("up", "down"))
            rounded = {up: by_hand(up, y), down: by_hand(down, torch.relu(layers[up](y)))}
            for name, layer in rounded.items():
                assert torch.equal(found[name].weight, layer.weight), name
            y = y + rounded[down](torch.relu(rounded[up](y)))
        assert torch.equal(found["head"].weight, by_hand("head", y).weight)
    assert {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)} == layers


def test_a_failure_leaves_the_float_layers_in_place() -> None:
    net, passes = Blocks(0, 2), 0
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    scales = {name: scales_of("w4a16", layer.weight.detach()) for name, layer in layers.items()}

    def broken(model: nn.Module, features: Mapping[str, Tensor]) -> object:
        nonlocal passes
        passes += 1
        if passes > 1:
            raise RuntimeError("no power")
        return send(model, features)

    with pytest.raises(RuntimeError, match="no power"):
        round_layers(net, layers, scales, "gptq", [[name] for name in layers], lambda: [{"x": torch.randn(9, 8)}], broken)
    assert {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)} == layers


def test_a_block_is_an_entry_of_an_outermost_list() -> None:
    net = nn.ModuleDict({"body": nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}) for _ in range(11))})
    units = [["body.0.experts.0", "body.1.q"], ["body.0.o"], ["body.10.experts.0"], ["body.1.o"], ["head"]]
    assert blocks(net, units) == [[units[0], units[1]], [units[2]], [units[3]], [units[4]]]


def test_the_float_model_stays_and_biases_are_shared() -> None:
    net, _, found, _ = rounded("w4a16", "gptq")
    for (name, layer), before in zip(layers_of(net).items(), layers_of(Net()).values(), strict=True):
        assert torch.equal(layer.weight, before.weight)
        assert found[name].bias is layer.bias


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "w4a16, zero points", "w4a16, k_quant"])
def test_nearest_is_what_the_scales_do(scheme: str) -> None:
    weight, scales = Net().a.weight.detach(), scales_of(scheme, Net().a.weight.detach())
    found, errors = round_weight(weight, scales, torch.eye(20), "nearest")
    assert torch.equal(found, scales.on_grid(weight))
    assert errors["error"] == errors["error_nearest"] > 0


def test_offsets_are_rounded_with_the_scales_by_gptq() -> None:
    """Against GPTQ of the weights plus their offsets, in codes from 0 to 15."""
    weight, x = Net().a.weight.detach(), rows()
    scales = scales_of("w4a16, k_quant", weight)
    assert isinstance(scales, Int4Scales)
    assert scales.weight_offset is not None
    hessian_II, scale_OI = x.T @ x / len(x), scales.expanded(20)
    offset_OI = scales.weight_offset.repeat_interleave(8, dim=1)[:, :20]
    codes = [gptq(weight + offset_OI, hessian_II, scale_OI, 0, 15), ((weight + offset_OI) / scale_OI).round().clamp(0, 15)]
    candidates = [code * scale_OI - offset_OI for code in codes]
    errors = [((candidate - weight).double() @ hessian_II.double() * (candidate - weight).double()).sum(1) for candidate in candidates]
    expected = torch.where((errors[0] < errors[1])[:, None], *candidates)
    found, _ = round_weight(weight, scales, hessian_II, "gptq")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(scales.codes(found), torch.where((errors[0] < errors[1])[:, None], *codes).to(torch.int8) - 8)


def test_a_layer_whose_input_was_always_zero_errs_by_nothing() -> None:
    weight = Net().a.weight.detach()
    found, errors = round_weight(weight, scales_of("w8a8", weight), torch.zeros(20, 20), "gptq")
    assert (errors["error"], errors["error_nearest"]) == (0, 0)
    assert torch.equal(found, scales_of("w8a8", weight).on_grid(weight))
