"""Tiny checkpoints with random weights, one for each family of models that export has to know, and a naive quantizer for them."""

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import nn

from export.graph.onnx import export_float
from foundation.models.folder import Checkpoint
from foundation.schemes.int8 import levels, weight_bits
from foundation.standalone.preprocess import Preprocessor
from tests.seldom import seldom

LENGTH = 40
_SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 3}
_TEXT = {**_SIZES, "vocab_size": 60, "max_position_embeddings": LENGTH}
_TWICE = {**_TEXT, "num_hidden_layers": 2}
_IMAGE = {**_SIZES, "image_size": 12, "patch_size": 4}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**_TWICE),
    "electra": lambda: transformers.ElectraConfig(**_TEXT, embedding_size=8),
    "albert": lambda: transformers.AlbertConfig(**_TWICE, embedding_size=8),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=60, dim=16, n_layers=1, n_heads=4, hidden_dim=24, max_position_embeddings=LENGTH, num_labels=3
    ),
    "roberta": lambda: transformers.RobertaConfig(**{**_TEXT, "max_position_embeddings": LENGTH + 2}, type_vocab_size=1),
    "modernbert": lambda: transformers.ModernBertConfig(
        **_TWICE,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "vit": lambda: transformers.ViTConfig(**_IMAGE),
    "deit": lambda: transformers.DeiTConfig(**_IMAGE),
}
IMAGES = ("vit", "deit")
RELATIVES = ("roberta", "electra", "deit")
"""Families whose graphs are those of another one but for the ends: the slow tests look at them."""
FAMILIES = seldom(CONFIGS, RELATIVES)
_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")  # removed when the test run ends


@cache
def exported(family: str) -> tuple[Path, Path]:
    """Writes and exports each family once for all tests, which leave the files alone: (checkpoint, ONNX file)."""
    folder = Path(_SCRATCH.name) / family
    return folder, export_float(Checkpoint(folder), write(folder, family), folder / "onnx" / "model.onnx")


@cache
def whole(family: str) -> Path:
    """Exports a family with all tokens of its last layer, as torch computes them."""
    folder, _ = exported(family)
    return export_float(Checkpoint(folder), preprocessor(family), folder / "whole" / "model.onnx", all_tokens=True)


def write(folder: Path, family: str) -> Preprocessor:
    """Writes a checkpoint of the family and returns its preprocessor."""
    config = CONFIGS[family]()
    config.architectures = []
    model = _auto(family).from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.4 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
    model.save_pretrained(folder)
    return preprocessor(family)


def preprocessor(family: str) -> Preprocessor:
    config = CONFIGS[family]()
    labels = ("a", "b", "c")
    if family in IMAGES:
        size, half = {"height": config.image_size, "width": config.image_size}, [0.5] * 3
        image = {"do_resize": True, "size": size, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "num_channels": 3}
        image |= {"do_normalize": True, "image_mean": half, "image_std": half, "do_convert_rgb": True, "do_center_crop": False}
        return Preprocessor("image", ("pixel_values",), labels, "image-classification", image=image)
    names = ("input_ids", "attention_mask", "token_type_ids")
    names = names if family in ("bert", "electra", "albert") else names[:2]
    return Preprocessor("text", names, labels, "text-classification", LENGTH, (LENGTH,), pad_token_id=config.pad_token_id)


def features(family: str, batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random rows; of text, every row after the first is padded further."""
    random, shape = np.random.default_rng(seed), (batch, length)
    if family in IMAGES:
        return {"pixel_values": random.standard_normal((batch, 3, 12, 12), np.float32)}
    prepared = preprocessor(family)
    mask = (np.arange(length) < np.maximum(1, length - 3 * np.arange(batch))[:, None]).astype(np.int64)
    values = {"input_ids": np.where(mask == 1, random.integers(3, 60, shape), prepared.pad_token_id), "attention_mask": mask}
    values["token_type_ids"] = random.integers(0, 2, shape)
    return {name: values[name] for name in prepared.input_names}


def load(folder: Path, family: str) -> torch.nn.Module:
    return _auto(family).from_pretrained(folder, attn_implementation="sdpa").eval()


def _auto(family: str):
    return transformers.AutoModelForImageClassification if family in IMAGES else transformers.AutoModelForSequenceClassification


EXACT = levels(weight_bits("cpu"))
"""The largest weight code that every kernel of this processor multiplies exactly."""


def quantize(folder: Path, family: str, scales: dict[str, float], out: Path, largest: int = EXACT) -> Path:
    """Writes a checkpoint whose chosen linears have weights on a grid, with its two files; `scales` are those of the inputs."""
    model, saved = load(folder, family), {}
    for name, scale in scales.items():
        weight = model.get_submodule(name).weight.data
        weight_scale = weight.abs().amax(1) / largest
        weight.copy_(torch.round(weight / weight_scale[:, None]) * weight_scale[:, None])
        saved |= {f"{name}.weight_scale": weight_scale, f"{name}.input_scale": torch.tensor(scale)}
    model.save_pretrained(out)
    save_file(saved, out / "quantization.safetensors")
    layers = {name: {"weight_bits": 8} for name in scales}
    settings = {"schema": 1, "scheme": "w8a8", "weight_bits": 8, "layers": layers, "float_layers": {}}
    (out / "quantization.json").write_text(json.dumps(settings))
    return out


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def with_weights(path: Path, weights: dict[str, np.ndarray], out: Path) -> Path:
    """Writes an exported model with other weights: what exporting them would give, without the seconds that takes."""
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        layer = tensor.name.removesuffix(".weight")
        if layer in weights:
            turned = any(tensor.name in node.input and node.op_type == "MatMul" for node in model.graph.node)
            weight = weights[layer].T if turned else weights[layer]
            assert tuple(tensor.dims) == weight.shape
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weight), tensor.name))
    onnx.save(model, str(out))
    return out
