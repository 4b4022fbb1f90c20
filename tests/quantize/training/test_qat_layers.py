"""Layers that train in int8: the bits of the integer layer, what their scales learn, what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes.int8 import Int8Linear, LayerScales, int8_linear, levels, quantize, weight_scale
from foundation.schemes.scales import SMALLEST_SCALE
from foundation.training.optimizers import parameter_groups
from quantize.calibration import Histogram, collect
from quantize.choices import Qat
from quantize.training.linear import QatLinear
from quantize.training.qat import extract, insert
from quantize.training.straight_through import Scale, codes_and_slope


def a_linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias)


def scales_of(linear: nn.Linear, input_scale: float = 0.02, bits: int = 8) -> LayerScales:
    return LayerScales(0.9 * weight_scale(linear.weight.detach(), levels(bits)), torch.tensor(input_scale), bits)


def inserted(linear: nn.Linear, scales: LayerScales, **settings: Any) -> tuple[nn.Sequential, QatLinear]:
    model = nn.Sequential(linear)
    insert(model, {"0": scales}, {"0": "0"}, **settings)
    layer = model[0]
    assert isinstance(layer, QatLinear)
    return model, layer


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 33), (1, 33), (2, 3, 33)])
def test_evaluation_and_training_give_the_bits_of_int8_linear(bits: int, bias: bool, shape: tuple[int, ...]) -> None:
    linear = a_linear(33, 5, bias)
    scales = scales_of(linear, bits=bits)
    codes = quantize(linear.weight.detach(), scales.weight_scale[:, None], -levels(bits), levels(bits))
    expected = Int8Linear("layer", codes, scales, None if linear.bias is None else linear.bias.detach())
    _, layer = inserted(linear, scales)
    for x in (2 * torch.randn(shape), torch.randn(shape).bfloat16()):
        with torch.no_grad():
            assert torch.equal(layer.train()(x), expected(x))
        assert torch.equal(layer.eval()(x), expected(x))
        assert layer(x).dtype == x.dtype
    assert torch.equal(layer.scales().weight_scale, scales.weight_scale)
    assert torch.equal(layer.scales().input_scale, scales.input_scale)


class TwoTensors(nn.Module):
    """Query, value and, in another module, gate read the input; out, beside query, reads another tensor of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out, self.value, self.inner = a_linear(4, 4), a_linear(4, 4), a_linear(4, 4), nn.Sequential(a_linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.query(x)) + self.value(x) + self.inner(x)
        return y


def test_input_scales_are_tied_by_the_tensor_that_is_read_and_not_by_their_value() -> None:
    net = TwoTensors()
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    observed = collect(net, layers, [{"x": torch.randn(3, 4)}], lambda model, features: model(features["x"]), Histogram)
    insert(net, {name: scales_of(layer) for name, layer in layers.items()}, observed.group)  # all start at the same value
    scales = {name: layer.input_scale for name, layer in net.named_modules() if isinstance(layer, QatLinear)}
    assert scales["query"] is scales["value"] is scales["inner.0"]
    assert scales["out"] is not scales["query"]
    net.train()(5 * torch.randn(8, 4)).square().sum().backward()
    gradients = [scale.change.grad for scale in (scales["query"], scales["out"])]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert gradients[0] != gradients[1]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_no_number_names_the_layer(value: float, training: bool) -> None:
    model, _ = inserted(a_linear(4, 3), LayerScales(torch.ones(3), torch.tensor(1.0), 8))
    x = torch.ones(5, 4)
    x[2, 1] = value
    with pytest.raises(InputError, match="0: the input of this quantized layer holds NaN or infinity"):
        model.train(training)(x)


def test_large_inputs_are_numbers_although_their_sum_is_not() -> None:
    model, _ = inserted(a_linear(4, 3), LayerScales(torch.ones(3), torch.tensor(1.0), 8))
    assert model.train()(torch.full((5, 4), 3e38)).isfinite().all()


def test_a_scale_learns_relative_to_its_start_and_stays_positive() -> None:
    scale = Scale(torch.tensor([0.02, 3.0]), 10.0, learned=True)
    assert torch.equal(scale(), torch.tensor([0.02, 3.0]))
    scale().sum().backward()
    assert scale.change.grad is not None
    torch.testing.assert_close(scale.change.grad, torch.tensor([0.2, 30.0]))
    with torch.no_grad():
        scale.change.copy_(torch.tensor([0.001, -1.0]))
    assert scale().tolist() == [pytest.approx(0.0202), SMALLEST_SCALE]


def test_scales_have_no_weight_decay_and_weights_keep_their_names() -> None:
    model, layer = inserted(a_linear(4, 3), scales_of(a_linear(4, 3)))
    decay = {id(parameter): group["weight_decay"] for group in parameter_groups(model, 0.1) for parameter in group["params"]}
    assert decay[id(layer.weight)] == 0.1
    assert layer.bias is not None
    assert all(decay[id(value)] == 0 for value in (layer.bias, layer.input_scale.change, layer.weight_scale.change))
    assert {"0.weight", "0.bias"} <= set(model.state_dict())


@pytest.mark.parametrize(("learned", "wanted"), [("lsq", (True, True)), ("pact", (True, False)), ("fixed", (False, False))])
def test_a_mode_learns_the_scales_it_says(learned: Any, wanted: tuple[bool, bool]) -> None:
    model, layer = inserted(a_linear(40, 3), scales_of(a_linear(40, 3)), learned=learned)
    model.train()(4 * torch.randn(8, 40)).square().sum().backward()
    for scale, learns in zip((layer.input_scale, layer.weight_scale), wanted, strict=True):
        assert (scale.change.grad is not None and bool(scale.change.grad.any())) == learns
    assert layer.weight.grad is not None


@pytest.mark.parametrize("start", [0.2, 5.0])
def test_lsq_finds_the_scale_of_least_squared_error(start: float) -> None:
    """The gradient by rounding and clipping is the derivative of the noise of a smooth distribution, and nothing else."""
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    candidates = torch.linspace(0.5, 6.0, 200) / 15
    errors = [float((quantize(x, s, -15, 15) * s - x).square().mean()) for s in candidates]
    best = float(candidates[int(np.argmin(errors))])
    scale = learned_scale(x, start * best, pact=False)
    assert scale == pytest.approx(best, rel=0.1)


@pytest.mark.whole
def test_pact_widens_a_scale_until_nothing_is_clipped() -> None:
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    assert learned_scale(x, 0.1, pact=True) == pytest.approx(float(x.abs().max()) / 15, rel=0.1)
    assert learned_scale(x, 1.0, pact=True) == 1.0  # where nothing is clipped there is no gradient


def learned_scale(x: Tensor, start: float, pact: bool) -> float:
    """The scale of 31 levels that gradient descent on the squared error of rounding ends at."""
    scale = Scale(torch.tensor(start), 4.0, learned=True)
    optimizer = torch.optim.Adam(scale.parameters(), lr=0.05)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 400)
        s = scale()
        codes, slope = codes_and_slope(x, s.detach(), -15, 15, None if pact else torch.float32)
        error = codes * s.detach() - x
        optimizer.zero_grad()
        s.backward((2 * error * slope).mean())
        optimizer.step()
    return float(scale().detach())


@pytest.mark.parametrize("learned", ["lsq", "fixed"])
def test_a_smoothed_layer_trains_as_the_product_it_stands_for(learned: Any) -> None:
    linear = a_linear(6, 4)
    smooth = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])  # powers of two: products are exact
    plain = a_linear(6, 4)
    with torch.no_grad():
        plain.weight *= smooth
    scales = scales_of(plain)
    _, expected = inserted(plain, scales, learned=learned)
    model, layer = inserted(linear, replace(scales, input_smooth=smooth), learned=learned)
    x = torch.randn(9, 6)
    assert torch.equal(layer(x), expected(x / smooth))
    layer(x).square().sum().backward()
    expected(x / smooth).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected.weight.grad * smooth)
    y = layer.eval()(x)
    found = extract(model)["0"]
    assert found.input_smooth is not None
    assert torch.equal(int8_linear("0", model[0], found)(x), y)  # type: ignore[arg-type]
    assert layer.train()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("key", "value"), [("epochs", 0), ("scales", "pakt"), ("soft_weight", 1.1), ("temperature", 0), ("lr", 1e-5)])
def test_settings_out_of_range_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=key):
        Qat(**{key: value})
