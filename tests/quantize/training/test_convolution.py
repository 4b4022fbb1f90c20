"""Convolutions that train in int8: integers as served, gradients against their formulas."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int8 import LayerScales, levels, weight_scale
from foundation.schemes.int8_convolution import ConvolutionScales, Geometry
from quantize.quantize import Quantize
from quantize.training.convolution import Int8ConvolutionFunction, QatConvolution
from quantize.training.linear import Int8Function
from quantize.training.qat import extract, insert
from quantize.training.straight_through import Int8Arithmetic
from tests.architectures.steps import Bench
from tests.architectures.table import ARCHITECTURES

GEOMETRIES = [
    Geometry((1, 1), ((1, 1), (0, 0)), (1, 1), 1),
    Geometry((2, 1), ((1, 1), (2, 2)), (1, 2), 2),
    Geometry((1, 1), ((0, 1), (1, 0)), (1, 1), 2),  # uneven, as padding "same" is
]


def leaves(geometry: Geometry, seed: int = 0) -> list[Tensor]:
    """Returns x, W, input scale, weight scales and bias; about one value in ten is clipped, at either end."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(2, 4, 6, 5, generator=generator), torch.randn(6, 4 // geometry.groups, 3, 2, generator=generator)
    scale_O = (0.8 + torch.rand(6, generator=generator)) * 1.2 / 127
    return [x, weight, torch.tensor(1.6 / 127), scale_O, torch.randn(6, generator=generator)]


def convolved(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    ends = [zeros for pair in reversed(geometry.padding) for zeros in pair]
    padded = nn.functional.pad(x, ends)
    return nn.functional.conv2d(padded, weight, None, geometry.stride, 0, geometry.dilation, geometry.groups)


@pytest.mark.parametrize("pact", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_are_those_of_the_formulas(geometry: Geometry, pact: bool) -> None:
    given = [value.clone().requires_grad_() for value in leaves(geometry)]
    y = Int8ConvolutionFunction.apply(*given, geometry, Int8Arithmetic(127, pact, torch.float32))
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(gradient)
    _, weight, s_x, s_w, bias = (value.detach().double() for value in given)
    v_x, v_w = (given[0] / given[2]).detach().double(), (given[1] / given[3][:, None, None, None]).detach().double()
    q_x, q_w = v_x.round().clamp(-128, 127), v_w.round().clamp(-127, 127)
    hat_x, hat_w = (q_x * s_x).requires_grad_(), (q_w * s_w[:, None, None, None]).requires_grad_()
    expected = convolved(hat_x, hat_w, geometry) + bias[:, None, None]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    expected.backward(gradient.double())
    inside_x, inside_w = (v_x > -128) & (v_x < 127), (v_w > -127) & (v_w < 127)
    slope_x = torch.where(inside_x, torch.zeros_like(v_x) if pact else q_x - v_x, q_x)
    slope_w = torch.where(inside_w, q_w - v_w, q_w)
    inputs = weight[0].numel()
    found = [
        hat_x.grad * inside_x,
        hat_w.grad * inside_w,
        (hat_x.grad * slope_x).sum() / math.sqrt(inputs * 127),
        (hat_w.grad * slope_w).sum((1, 2, 3)) / math.sqrt(inputs * 127),
        gradient.double().sum((0, 2, 3)),
    ]
    for leaf, value in zip(given, found, strict=True):
        torch.testing.assert_close(leaf.grad.double(), value, rtol=1e-4, atol=1e-4)


def test_a_kernel_of_one_position_is_a_linear_layer() -> None:
    geometry = Geometry((1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    x, _, s_x, s_w, bias = leaves(geometry)
    fixed, weight = Int8Arithmetic(127, False, torch.float32), torch.randn(6, 4)
    one = [value.clone().requires_grad_() for value in (x, weight[:, :, None, None], s_x, s_w, bias)]
    other = [value.clone().requires_grad_() for value in (x.movedim(1, -1), weight, s_x, s_w, bias)]
    y, z = Int8ConvolutionFunction.apply(*one, geometry, fixed), Int8Function.apply(*other, None, fixed)
    assert torch.equal(y.movedim(1, -1), z)
    y.square().sum().backward()
    z.square().sum().backward()
    torch.testing.assert_close(one[0].grad.movedim(1, -1), other[0].grad)
    torch.testing.assert_close(one[1].grad.flatten(1), other[1].grad)
    for left, right in zip(one[2:], other[2:], strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def inserted() -> tuple[nn.Sequential, nn.Conv2d, dict[str, LayerScales], Tensor]:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3, padding="same", groups=2), torch.randn(2, 4, 5, 5)
    scale_O = weight_scale(layer.weight.detach().flatten(1), levels(7))
    scales: dict[str, LayerScales] = {"0": ConvolutionScales(scale_O, torch.tensor(0.02), 7)}
    model = nn.Sequential(layer).eval()
    insert(model, scales, {"0": "0"}, rate=10)
    return model, layer, scales, x


def test_training_and_evaluation_compute_what_is_served() -> None:
    model, layer, scales, x = inserted()
    served = scales["0"].module("0", layer)(x)
    assert isinstance(model[0], QatConvolution)
    assert torch.equal(model(x), served)
    assert torch.equal(model.train()(x), served)
    assert set(dict(model.named_parameters())) == {"0.weight", "0.bias", "0.input_scale.change", "0.weight_scale.change"}
    x[0, 0, 0, 0] = torch.inf
    with pytest.raises(InputError, match="0: the input of this quantized layer holds NaN or infinity"):
        model(x)


def test_a_step_moves_weights_and_scales_and_leaves_a_plain_layer_on_its_grid() -> None:
    model, layer, scales, x = inserted()
    optimizer = torch.optim.SGD(model.train().parameters(), 1e-2)
    before = layer.weight.detach().clone()
    model(x).square().mean().backward()
    optimizer.step()
    trained = model.eval()(x)
    learned = extract(model)["0"]
    assert type(model[0]) is nn.Conv2d
    assert not torch.equal(model[0].weight, before)
    assert not torch.equal(learned.weight_scale, scales["0"].weight_scale)
    assert learned.input_scale != scales["0"].input_scale
    assert learned.problem(model[0].weight.detach()) is None
    assert torch.equal(learned.module("0", model[0])(x), trained)


@pytest.mark.whole
@pytest.mark.parametrize("dropout", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resnet_trains_in_int8(dropout: bool, tmp_path: Path) -> None:
    bench = Bench.of(ARCHITECTURES["resnet"], tmp_path)
    settings = {"batch_size": 8, "keep": "last", "learning_rate": 1e-3, "dropout": dropout}
    stage = Quantize(mode="qat", calibration={"rows": 16}, qat=settings, weight_bits=8)
    before = load_quantization(bench.run(stage.model_copy(update={"mode": "ptq"})).path)[0]
    after = load_quantization(bench.run(stage).path)[0]
    assert set(after) == set(before)
    assert all(not torch.equal(after[name].tensors()["weight_scale"], before[name].tensors()["weight_scale"]) for name in before)
