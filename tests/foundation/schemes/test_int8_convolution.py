"""Convolutions in true int8 against written-out integers, and their place in a checkpoint."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes.checkpoint import apply_quantization, load_quantization, save_quantization
from foundation.schemes.int8 import LayerScales, levels, weight_scale
from foundation.schemes.int8_convolution import ConvolutionScales, Geometry, Int8Convolution, int8_convolution


def naive(x: np.ndarray, weight: np.ndarray, geometry: Geometry) -> np.ndarray:
    """One output at a time, in int64: the definition of a convolution."""
    outputs, depth, *kernel = weight.shape
    padded = np.pad(x.astype(np.int64), [(0, 0), (0, 0), *geometry.padding])
    moves = list(zip(padded.shape[2:], kernel, geometry.stride, geometry.dilation, strict=True))
    sizes = [(size - dilation * (k - 1) - 1) // stride + 1 for size, k, stride, dilation in moves]
    y = np.zeros((len(x), outputs, *sizes), np.int64)
    for b, o in itertools.product(range(len(x)), range(outputs)):
        first = o // (outputs // geometry.groups) * depth  # the first input channel of the group of this output
        for at in itertools.product(*(range(size) for size in sizes)):
            for c, tap in itertools.product(range(depth), itertools.product(*(range(k) for k in kernel))):
                place = tuple(p * stride + t * dilation for p, t, (_, _, stride, dilation) in zip(at, tap, moves, strict=True))
                y[(b, o, *at)] += padded[(b, first + c, *place)] * int(weight[(o, c, *tap)])
    return y


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Conv1d | nn.Conv2d:
    axes, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    pair = st.tuples(*[st.integers(1, 2)] * axes)
    channels, outputs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 2))
    kernel, dilation = draw(st.tuples(*[st.integers(1, 3)] * axes)), draw(pair)
    if draw(st.booleans()):
        stride, padding = draw(pair), draw(st.tuples(*[st.integers(0, 2)] * axes))
    else:
        stride, padding = (1,) * axes, "same"
    return (nn.Conv1d, nn.Conv2d)[axes - 1](channels, outputs, kernel, stride, padding, dilation, groups)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(convolutions(), st.integers(0, 99))
def test_a_convolution_equals_written_out_integers(layer: nn.Conv1d | nn.Conv2d, seed: int) -> None:
    generator, geometry = torch.Generator().manual_seed(seed), Geometry.of(layer)
    x = torch.randint(-128, 128, (2, layer.in_channels, *(5, 6)[: len(layer.kernel_size)]), dtype=torch.int8, generator=generator)
    weight = torch.randint(-127, 128, layer.weight.shape, dtype=torch.int8, generator=generator)
    y = int8_convolution(x, weight, geometry)
    assert y.dtype == torch.int32
    assert y.shape == layer(x.float()).shape
    assert np.array_equal(y.numpy(), naive(x.numpy(), weight.numpy(), geometry))


@pytest.mark.parametrize(("channels", "groups", "kernel"), [(1, 1, 32), (6, 6, 31), (2048, 1, 3), (4096, 2, 1), (1030, 2, 3)])
@pytest.mark.parametrize(("left", "right"), [(-128, -127), (127, 127), (-128, 127)])
def test_the_largest_products_never_round_or_saturate(channels: int, groups: int, kernel: int, left: int, right: int) -> None:
    x = torch.full((1, channels, kernel, kernel), left, dtype=torch.int8)
    weight = torch.full((groups, channels // groups, kernel, kernel), right, dtype=torch.int8)
    weight[0, 0, 0, 0] = 1  # an odd sum close to the largest one shows a lost last bit
    products = channels // groups * kernel**2
    expected = [left * right * (products - 1) + left] + [left * right * products] * (groups - 1)
    y = int8_convolution(x, weight, Geometry((1, 1), ((0, 0), (0, 0)), (1, 1), groups))
    assert y.flatten().tolist() == expected


def drawn(groups: int = 2, bias: bool = True) -> tuple[nn.Conv2d, ConvolutionScales, Tensor]:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=groups, bias=bias), torch.randn(2, 4, 7, 6).clamp(-2.5, 2.5)
    scale_O = weight_scale(layer.weight.detach().flatten(1), levels(8))
    return layer, ConvolutionScales(scale_O, torch.tensor(0.02), 8), x


@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_rescales_once_and_adds_the_bias(bias: bool) -> None:
    layer, scales, x = drawn(bias=bias)
    made = scales.module("conv", layer.requires_grad_(False))
    codes_x = np.clip(np.rint(x.numpy() / np.float32(0.02)), -128, 127).astype(np.int64)
    codes_w = np.rint(layer.weight.detach().numpy() / scales.weight_scale.numpy()[:, None, None, None]).astype(np.int64)
    sums = naive(codes_x, codes_w, Geometry.of(layer)).astype(np.float32)
    expected = sums * (np.float32(0.02) * scales.weight_scale.numpy())[:, None, None]
    if layer.bias is not None:
        expected = expected + layer.bias.detach().numpy()[:, None, None]
    assert np.array_equal(made(x).numpy(), expected)
    assert float((made(x) - layer(x)).abs().max()) < 0.1
    assert made(x.bfloat16()).dtype == torch.bfloat16


def test_a_value_without_a_code_is_named_with_its_layer() -> None:
    layer, scales, x = drawn()
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match=r"body\.conv: the input .* NaN or infinity"):
        scales.module("body.conv", layer)(x)


def written(folder: Path) -> tuple[nn.Sequential, ConvolutionScales]:
    """Writes a checkpoint of a model with a convolution and a linear layer."""
    layer, scales, _ = drawn()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(3, 2))
    linear = LayerScales(weight_scale(model[2].weight.detach(), 127), torch.tensor(0.1), 8)
    for index, found in ((0, scales), (2, linear)):
        model[index].weight.data = found.on_grid(model[index].weight.detach())
    save_file(model.state_dict(), folder / "model.safetensors")
    save_quantization(folder, {"0": scales, "2": linear}, {})
    return model, scales


def test_a_checkpoint_gives_the_same_layer_back(tmp_path: Path) -> None:
    model, scales = written(tmp_path)
    (read, linear), expected = load_quantization(tmp_path)[0].values(), scales.codes(model[0].weight.detach())
    assert type(read) is ConvolutionScales
    assert type(linear) is LayerScales
    assert torch.equal(read.weight_scale, scales.weight_scale)
    assert torch.equal(read.codes(read.on_grid(model[0].weight.detach())), expected)
    grid = model[0].weight.detach().clone()
    apply_quantization(model, tmp_path)
    assert isinstance(model[0], Int8Convolution)
    assert torch.equal(model[0].weight_codes, expected)
    assert torch.equal(model[0].weight, scales.on_grid(grid))  # in float, as models cast their input to its dtype


def test_a_checkpoint_that_does_not_fit_its_model_is_refused(tmp_path: Path) -> None:
    model, _ = written(tmp_path)
    with pytest.raises(InputError, match=r"names 0, which is not a convolution .*; quantize again"):
        apply_quantization(nn.Sequential(nn.Linear(4, 6), nn.Flatten(), model[2]), tmp_path)
    model[0].weight.data[0, 0, 0, 0] += 0.003
    with pytest.raises(InputError, match="0: its weights are not on the grid of its scales"):
        apply_quantization(model, tmp_path)
    document = json.loads((tmp_path / "quantization.json").read_text())
    (tmp_path / "quantization.json").write_text(json.dumps(document | {"scheme": "w8a8-dynamic"}))
    with pytest.raises(InputError, match="its scheme has no convolutions"):
        load_quantization(tmp_path)
