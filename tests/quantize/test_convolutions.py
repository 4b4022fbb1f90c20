"""Which convolutions are quantized, and what every step of the stage does with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from foundation.models.checkpoint import load
from foundation.models.forward import forward, linears
from foundation.models.inputs.images import image_shape
from foundation.models.inputs.padding import real_rows
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int8 import weight_scale
from foundation.schemes.int8_convolution import ConvolutionScales, Int8Convolution
from quantize.bias_correction import correct_biases
from quantize.calibration import Histogram, collect
from quantize.convolutions import BESIDE_ATTENTION, OFF, OUTSIDE, READS_IMAGE, convolutions, float_convolutions
from quantize.ptq import choose_layers, mse_weight_scale
from quantize.quantize import Quantize
from quantize.sensitivity import quantized_part, rounded_input
from tests.architectures.steps import Bench, drawn
from tests.architectures.table import ARCHITECTURES
from tests.problems import raises_problem


def rows(model: Any, number: int = 4) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(number, *image_shape(model.config), generator=torch.Generator().manual_seed(0))}


def split(name: str, choice: Any = "auto", scheme: str = "w8a8") -> tuple[set[str], dict[str, str]]:
    """Returns the convolutions of a tiny model that are quantized, and the reasons for the others."""
    model = drawn(ARCHITECTURES[name])
    kept = float_convolutions(model, scheme, choice, rows(model), forward)
    return set(convolutions(model)) - set(kept), kept


@pytest.mark.parametrize(
    ("name", "first", "number"),
    [
        ("resnet", "resnet.embedder.embedder.convolution", 13),
        ("convnext", "convnext.embeddings.patch_embeddings", 8),
        ("poolformer", "poolformer.encoder.patch_embeddings.0.projection", 13),  # inside a list of modules
    ],
)
def test_a_model_made_of_convolutions_has_all_but_the_first_in_int8(name: str, first: str, number: int) -> None:
    chosen, kept = split(name)
    assert kept == {first: READS_IMAGE}
    assert len(chosen) == number


def test_those_of_a_transformer_stay_float() -> None:
    assert split("vit") == (set(), {"vit.embeddings.patch_embeddings.projection": READS_IMAGE})
    chosen, kept = split("segformer")
    assert not chosen
    assert sorted(kept.values()) == [BESIDE_ATTENTION] * (len(kept) - 1) + [READS_IMAGE]


def test_a_transformer_whose_layers_are_convolutions_is_made_of_them() -> None:
    chosen, kept = split("mobilevitv2")
    assert "mobilevitv2.encoder.layer.2.transformer.layer.0.attention.qkv_proj.convolution" in chosen
    assert kept == {"mobilevitv2.conv_stem.convolution": READS_IMAGE}


@pytest.mark.whole
def test_the_setting_overrides_the_rule() -> None:
    assert split("vit", choice=True) == ({"vit.embeddings.patch_embeddings.projection"}, {})
    chosen, kept = split("resnet", choice=False)
    assert not chosen
    assert set(kept.values()) == {OFF}
    chosen, kept = split("resnet", scheme="w4a16")
    assert not chosen
    assert set(kept.values()) == {"scheme w4a16 has no convolutions; w8a8 has"}
    with pytest.raises(ValidationError, match=r"convolutions: int8 .* scheme w8a8; w8a8-dynamic leaves"):
        Quantize(scheme="w8a8-dynamic", convolutions=True)


class Scaled(nn.Conv2d):
    """A convolution that does more than one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Stack(nn.Module):
    """Blocks of convolutions, one of them outside."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.neck = nn.Conv2d(3, 4, 1), nn.ModuleList(layers), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.blocks:
            x = layer(x)
        y: Tensor = self.neck(x).mean((2, 3))
        return y


def logits(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    y: Tensor = model(features["x"])
    return y


def test_what_cannot_be_computed_in_integers_stays_float() -> None:
    model = Stack(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), Scaled(4, 4, 1), nn.Conv2d(4, 4, 1))
    features, kinds = {"x": torch.randn(2, 3, 5, 5)}, {"blocks.0": "it pads with reflect, not with zeros"}
    kinds |= {"blocks.1": "Scaled computes more than a convolution"}
    assert float_convolutions(model, "w8a8", True, features, logits) == kinds
    assert float_convolutions(model, "w8a8", "auto", features, logits) == {**kinds, "stem": READS_IMAGE, "neck": OUTSIDE}


def test_patterns_and_messages_know_convolutions() -> None:
    model = Stack(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3))
    kept = {"stem": READS_IMAGE, "neck": OUTSIDE}
    chosen, reasons = choose_layers(model, convolutions(model), ("blocks.1",), "key", kept)
    assert list(chosen) == ["blocks.0"]
    assert reasons == {**kept, "blocks.1": "excluded by 'blocks.1'"}
    with raises_problem("key", "no layer is left", "2 convolutions stay float"):
        choose_layers(model, convolutions(model), ("blocks.*",), "key", kept)


def test_padding_of_a_text_is_left_out_of_a_convolution_along_it() -> None:
    features = {"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    x_NCL = torch.arange(18.0).reshape(2, 3, 3)  # as many channels as tokens
    assert torch.equal(real_rows(x_NCL, features, 1), torch.stack([x_NCL[0, :, 0], x_NCL[0, :, 1], x_NCL[1, :, 0]]))
    layer = nn.Conv1d(3, 2, 1)
    model = nn.Sequential(layer)
    observed = collect(model, {"0": layer}, [features], lambda model, _: model(x_NCL), Histogram)
    assert (observed.of("0").total, observed.of("0").largest) == (9, 15.0)


def small() -> tuple[nn.Sequential, dict[str, nn.Conv2d], dict[str, ConvolutionScales], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4)).requires_grad_(False)
    layers = {name: layer for name, layer in model.named_children() if isinstance(layer, nn.Conv2d)}
    scales = {name: ConvolutionScales(weight_scale(layer.weight.flatten(1), 7), torch.tensor(0.1), 8) for name, layer in layers.items()}
    return model, layers, scales, torch.randn(8, 3, 6, 6)


def test_the_weight_scale_of_a_convolution_is_that_of_its_matrix() -> None:
    weight = torch.randn(4, 3, 2, 2)
    from quantize.schemes import weight_grids

    layer = nn.Conv2d(3, 4, 2)
    layer.weight.data = weight
    assert torch.equal(weight_grids("w8a8", {"conv": layer}, 8, 128, {})["conv"].scale, mse_weight_scale(weight.reshape(4, 12), 127))


def test_both_halves_of_a_convolution_together_are_the_int8_layer() -> None:
    _, layers, scales, x = small()
    weights, inputs, both = (quantized_part("conv", layers["0"], scales["0"], part) for part in ("weights", "inputs", "both"))
    torch.testing.assert_close(weights(rounded_input(x, scales["0"])), both(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs(x), layers["0"](rounded_input(x, scales["0"])))


def test_bias_correction_makes_the_means_of_channels_equal() -> None:
    model, layers, scales, x = small()
    expected = model(x).mean((0, 2, 3))
    groups = {name: name for name in layers}
    correct_biases(model, layers, scales, groups, lambda: [{"x": x}], lambda model, given: model(given["x"]))
    made = nn.Sequential(scales["0"].module("0", layers["0"]), nn.ReLU(), scales["2"].module("2", layers["2"]))
    torch.testing.assert_close(made(x).mean((0, 2, 3)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("name", ["resnet", "convnext"])
def test_a_checkpoint_loads_and_computes_what_was_quantized(name: str, tmp_path: Path) -> None:
    bench = Bench.of(ARCHITECTURES[name], tmp_path)
    source = load(bench.float_model.path)
    quantized = bench.run(Quantize(calibration={"rows": 16}, weight_bits=8))
    scales, kept = load_quantization(quantized.path)
    model = load(quantized.path)
    found = {path: module for path, module in model.named_modules() if isinstance(module, Int8Convolution)}
    assert {path for path, given in scales.items() if type(given) is ConvolutionScales} == set(found)
    assert set(scales) | set(kept) == set(linears(source)) | set(convolutions(source))
    before, after = (logits_of(bench, folder) for folder in (bench.float_model.path, quantized.path))
    assert float((before - after).abs().max()) < 0.2 * float(before.std())
    stock = source.load_state_dict(load_stock(quantized.path))
    assert not stock.missing_keys
    assert not stock.unexpected_keys


def logits_of(bench: Bench, folder: Path) -> Tensor:
    """Returns what a checkpoint answers to training rows."""
    _, features = next(iter(bench.context.preprocessor(folder).batches(bench.context.data.train.rows, 16)))
    with torch.inference_mode():
        return forward(load(folder), {name: torch.from_numpy(value) for name, value in features.items()})


def load_stock(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.whole
def test_every_step_handles_or_skips_convolutions(tmp_path: Path) -> None:
    bench = Bench.of(ARCHITECTURES["convnext"], tmp_path)
    stage = Quantize(
        calibration={"rows": 16, "method": "auto"},
        rounding="gptq",
        equalization=True,
        bias_correction=True,
        mixed_precision={"max_drop": 1.0, "max_float": 0.5},
        weight_bits=8,
    )
    figures = stage.run(bench.float_model, bench.context, bench.out("all"))
    scales, _ = load_quantization(next(tmp_path.glob("all*")))
    convolved = {name for name, given in scales.items() if type(given) is ConvolutionScales}
    assert len(convolved) == 8
    assert {layer["name"] for layer in figures["rounding"]["layers"]} == set(scales) - convolved
    assert {layer["name"] for layer in figures["sensitivity"]["layers"]} == set(scales)
    assert convolved <= set(figures["bias_correction"]["shifts"])


@pytest.mark.slow
@pytest.mark.whole
def test_biases_of_folded_norms_are_corrected(tmp_path: Path) -> None:
    bench = Bench.of(ARCHITECTURES["resnet"], tmp_path)
    figures = Quantize(calibration={"rows": 16}, bias_correction=True).run(bench.float_model, bench.context, bench.out("corrected"))
    assert set(figures["bias_correction"]["shifts"]) == {layer["name"] for layer in figures["layers"]} == set(figures["batch_norms"])


@pytest.mark.whole
def test_a_patch_embedding_is_quantized_if_asked_to(tmp_path: Path) -> None:
    bench = Bench.of(ARCHITECTURES["vit"], tmp_path)
    quantized = bench.run(Quantize(calibration={"rows": 16}, convolutions=True))
    scales, _ = load_quantization(quantized.path)
    assert type(scales["vit.embeddings.patch_embeddings.projection"]) is ConvolutionScales
    before, after = (logits_of(bench, folder) for folder in (bench.float_model.path, quantized.path))
    assert float((before - after).abs().max()) < 0.2 * float(before.std())
