"""A ViT on the kernels: the codes of every layer are torch's, its parts are proved, and a recording of more images changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from export.fused import image_parts
from export.fused.layers import Probe
from export.fused.parts import plan_of
from export.fused.plan import Patches, read_plan, write_plan
from export.fused.rows import filled, images
from export.fused.runner import Runner
from foundation.core.errors import InputError
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import Int8Linear, LayerScales, levels, weight_scale
from foundation.schemes.int8_convolution import ConvolutionScales, Int8Convolution
from tests.export.fused.encoders import Again
from tests.export.fused.test_forward import compare_codes

Interpreted = Callable[..., Any]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, "num_labels": 3}
SHAPE, EDGE, TOKENS = (3, 8, 12), 4, 7
FLOATS = {"all int8": (), "mixed": ("0.attention.k_proj", "1.mlp.fc1", "projection"), "uneven": ()}


def checkpoint(folder: Path, name: str = "all int8", config: Any = None) -> Path:
    """Writes a w8a8 checkpoint of a ViT; `uneven`: keys have a scale of their own."""
    torch.manual_seed(0)
    if config is None:
        config = transformers.ViTConfig(**SIZES, image_size=list(SHAPE[1:]), patch_size=EDGE)
    model: Any = transformers.AutoModelForImageClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) if parameter.ndim > 1 else parameter + 0.1 * torch.randn(parameter.shape))
    source, out = folder / "float", folder / "int8"
    model.save_pretrained(source)
    out.mkdir()
    layers = {
        name_: module
        for name_, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and name_ != "classifier" and not name_.endswith(FLOATS[name] or ("\0",))
    }
    largest: dict[str, float] = {}
    for path, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, inputs, path=path: largest.update({path: 0.9 * float(inputs[0].abs().max())}))
    with torch.inference_mode():
        model(pixel_values=torch.from_numpy(pictures(4)["pixel_values"]))
    scales: dict[str, Any] = {}
    for path, layer in layers.items():
        layer._forward_pre_hooks.clear()
        scale = torch.tensor(largest[path] / 127 * (1.5 if name == "uneven" and path.endswith("k_proj") else 1.0))
        kind = ConvolutionScales if isinstance(layer, nn.Conv2d) else LayerScales
        scales[path] = kind(weight_scale(layer.weight.data.flatten(1), levels(8)), scale, 8)
        layer.weight.data = scales[path].on_grid(layer.weight.data)
    save(model, source, out, "Quantized")
    save_quantization(out, scales, {"classifier": "head"})
    return out


def pictures(count: int, seed: int = 0) -> dict[str, Any]:
    return {"pixel_values": np.random.default_rng(seed).standard_normal((count, *SHAPE)).astype(np.float32)}


def in_kernels(folder: Path, given: Mapping[str, Any], size: int) -> tuple[Tensor, dict[str, Probe], list[Tensor], Tensor]:
    """Returns logits, probes, the last states of the images alone and filled up, and the logits of recordings made of other images."""
    path = folder / "plan.safetensors"
    write_plan(plan_of(Checkpoint(folder)), path)
    runner = Runner(path, "cpu", "fp32", (size,), (), Again)
    encoder, rows = runner._encoder, images(given, SHAPE, TOKENS)
    logits, probes = encoder.probe(rows)
    among = [encoder.pooled(some)[: rows.sequences] for some in (rows, filled(rows, size * TOKENS, size))]
    runner.prepare()
    return logits, probes, among, torch.from_numpy(runner.predict(given))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FLOATS)
def test_the_codes_of_every_layer_are_torchs(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    folder, given = checkpoint(tmp_path, name), pictures(2, seed=1)
    model: Any = load(folder)
    read: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    convolution = "vit.embeddings.patch_embeddings.projection"
    patches = Patches(plan_of(Checkpoint(folder)).linears[0], *SHAPE, EDGE)

    def keep(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        flat = patches.of(x) if x.ndim == 4 else x.flatten(0, 1)
        read[layer.name] = flat, layer.codes(flat), layer.input_scale

    for module in model.modules():
        if isinstance(module, Int8Linear | Int8Convolution):
            module.register_forward_pre_hook(keep)
    with torch.inference_mode():
        wanted = model(pixel_values=torch.from_numpy(given["pixel_values"])).logits
    assert (convolution in read) == (name != "mixed")
    logits, probes, among, recorded = interpreted(in_kernels, folder, given, 3)
    of_patches = {convolution: probes.pop(convolution)} if convolution in probes else {}
    for path, probe in of_patches.items():
        assert torch.equal(probe.codes, read[path][1])
        assert torch.equal(patches.joined(probe.x), torch.from_numpy(given["pixel_values"]))
        with torch.inference_mode():
            layer = model.get_submodule(path)
            biased = patches.laid_out(probe.y + layer.bias)
            assert torch.equal(biased, layer(torch.from_numpy(given["pixel_values"])))
        del read[path]
    answers: Any = type("Answers", (), {"probes": probes})
    same = compare_codes(read, answers, [TOKENS, TOKENS])
    assert any(same)
    torch.testing.assert_close(logits[same], wanted[same], rtol=1e-4, atol=1e-4)
    if name == "all int8":  # products of torch may add up in another order for other numbers of rows
        assert torch.equal(*among)
    torch.testing.assert_close(*among, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recorded, logits, rtol=1e-5, atol=1e-5)


def test_patches_are_what_a_convolution_reads() -> None:
    patches, pixels = Patches(None, *SHAPE, EDGE), torch.randn(2, *SHAPE)  # type: ignore[arg-type]
    convolution = nn.Conv2d(SHAPE[0], 5, EDGE, EDGE)
    with torch.inference_mode():
        found = patches.laid_out(patches.of(pixels) @ convolution.weight.flatten(1).T + convolution.bias)
        torch.testing.assert_close(found, convolution(pixels))
    assert torch.equal(patches.joined(patches.of(pixels)), pixels)


def test_a_plan_of_images_is_read_back(tmp_path: Path) -> None:
    plan = plan_of(Checkpoint(checkpoint(tmp_path)))
    write_plan(plan, tmp_path / "plan")
    again = read_plan(tmp_path / "plan")
    assert again.pre_norm
    assert again.patches is not None
    assert replace(again.patches, projection=None) == Patches(None, *SHAPE, EDGE)  # type: ignore[arg-type]
    assert [layer.name for layer in again.linears] == [layer.name for layer in plan.linears]
    assert again.integer_share == plan.integer_share
    assert again.longest == TOKENS


SQUARE: Any = {"image_size": 8, "patch_size": 4}
RESNET = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "deit": (
        transformers.DeiTForImageClassificationWithTeacher,
        transformers.DeiTConfig(**SIZES, **SQUARE),
        "learned states|linear layers",
    ),
    "mish": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(**SIZES, **SQUARE, hidden_act="mish"),
        "its activation is mish",
    ),
    "resnet": (transformers.ResNetForImageClassification, RESNET, "blocks|layers"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name: str, tmp_path: Path) -> None:
    kind, config, why = OTHERS[name]
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(tmp_path)
    layer = next(path for path, module in model.named_modules() if isinstance(module, nn.Linear))
    scales = LayerScales(weight_scale(model.get_submodule(layer).weight.data, levels(8)), torch.tensor(0.1), 8)
    save_quantization(tmp_path, {layer: scales}, {})
    with pytest.raises(InputError, match=rf"ViT.*({why})"):
        plan_of(Checkpoint(tmp_path))


def test_modules_of_vit_that_compute_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, logits = checkpoint(tmp_path), image_parts.ImagePaths.logits
    monkeypatch.setattr(image_parts.ImagePaths, "logits", lambda *arguments: 1.1 * logits(*arguments))
    with pytest.raises(InputError, match="modules of ViT and computes otherwise"):
        plan_of(Checkpoint(folder))


def test_images_of_another_shape_are_refused() -> None:
    for wrong in ((2, 3, 8, 8), (0, *SHAPE)):
        with pytest.raises(InputError) as raised:
            images({"pixel_values": np.zeros(wrong, np.float32)}, SHAPE, TOKENS)
        assert raised.value.problems[0].key == "pixel_values"
