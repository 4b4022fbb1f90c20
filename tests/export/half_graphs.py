"""Models of every kind whose graphs are made half: small ones, and a BERT-base; every linear layer but the head on a grid of int8."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from export.graph.half_precision import Half, Halved, clamp_masks, float_tensors, to_half_precision
from export.graph.onnx import export_float
from export.graph.onnx import save as save_graph
from export.graph.qdq import insert_qdq
from export.graph.ranges import Ranges, measure
from export.graph.split_products import split_products
from foundation.artifacts.graph import Graph
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class, with_sizes
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class
from foundation.standalone.preprocess import Preprocessor
from tests.foundation.sizes import sizes_of

LENGTH, VOCABULARY = 64, 60
_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_labels": 3}
_T5: dict[str, Any] = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**_TEXT),
    "ragged": lambda: transformers.BertConfig(**_TEXT),
    "bert-base": lambda: transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=64, n_layers=2, n_heads=2, hidden_dim=96, max_position_embeddings=LENGTH, num_labels=3
    ),
    "vit": lambda: transformers.ViTConfig(**_SIZES, image_size=12, patch_size=4, num_labels=3),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    ),
    "t5": lambda: transformers.T5Config(**_T5, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0),
}
"""`ragged` is a pruned BERT: 2 heads and 89 neurons in one layer, 1 head and 40 neurons in the other. `bert-base` has the sizes of
BERT-base but for its table of tokens: 12 layers, heads of 64. `t5` has both of its sides."""
AS_DRAWN = ("t5", "bert-base")
"""Kinds whose weights stay as they were drawn: four times as large, those of a wide model would amplify every rounding."""
TASKS: dict[str, Task] = {"vit": "image-classification", "gpt2": "text-generation", "t5": "text-to-text"}
_NAMES = {"vit": ("pixel_values",), "gpt2": ("input_ids",), "t5": ("input_ids", "attention_mask", "decoder_input_ids")}
_SCRATCH = tempfile.TemporaryDirectory(prefix="half-graphs-")


def names(kind: str) -> tuple[str, ...]:
    """Returns the inputs of a kind."""
    return _NAMES.get(kind, ("input_ids", "attention_mask"))


@cache
def graph(kind: str) -> Path:
    """Returns the float graph, made once for all tests, which leave the file alone."""
    return export_float(Checkpoint(_checkpoint(kind)), _preprocessor(kind), Path(_SCRATCH.name) / f"{kind}.onnx", all_tokens=True)


@cache
def quantized(kind: str) -> Path:
    """Returns the Q/DQ graph."""
    return insert_qdq(Graph(graph(kind)), Checkpoint(_checkpoint(kind)), Path(_SCRATCH.name) / f"{kind}-int8.onnx")


@cache
def split(path: Path) -> Path:
    """Returns a Q/DQ graph whose products are split where their results are; itself where none is."""
    model = onnx.load(str(path))
    return save_graph(model, path.with_name(f"{path.stem}-split.onnx")) if split_products(model) else path


@cache
def measured(path: Path) -> tuple[onnx.ModelProto, Ranges]:
    """Returns a graph with its masks clamped, and its ranges on `features(kind, 6, ...)`."""
    model = onnx.load(str(path))
    clamp_masks(model)
    kind = path.stem.removesuffix("-split").removesuffix("-int8")
    return model, measure(model, float_tensors(model), [features(kind, 3, 16, 1), features(kind, 3, 40, 2)])


def halved(path: Path, half: Half = "fp16") -> Halved:
    """Returns the half graph of a graph."""
    return to_half_precision(*measured(path), half)


def features(kind: str, batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random rows; of text, every row after the first is padded further."""
    random = np.random.default_rng(seed)
    if kind == "vit":
        return {"pixel_values": random.standard_normal((batch, 3, 12, 12), np.float32)}
    mask = (np.arange(length) < np.maximum(1, length - 3 * np.arange(batch))[:, None]).astype(np.int64)
    ids = random.integers(3, VOCABULARY, (batch, length))
    values = {"input_ids": ids if kind == "gpt2" else ids * mask, "attention_mask": mask, "decoder_input_ids": ids[:, ::-1] * mask}
    return {name: np.ascontiguousarray(values[name]) for name in names(kind)}


@cache
def _checkpoint(kind: str) -> Path:
    task = TASKS.get(kind, "text-classification")
    config = with_class(CONFIGS[kind](), task)
    if kind == "ragged":
        uneven = {"heads": (2, 1), "key_value_heads": (2, 1), "ffn": (89, 40)}
        config = with_sizes(config, replace(sizes_of(config, "tests"), **uneven), "tests")
    torch.manual_seed(0)
    model: Any = with_linears(auto_class(task, config).from_config(config)).eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module.out_features > 3}
    layers.pop("lm_head", None)
    scales = {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                (1 if kind in AS_DRAWN else 4) * parameter if parameter.ndim > 1 else parameter + 0.1 * torch.randn_like(parameter)
            )
        for name, layer in layers.items():
            weight_scale = layer.weight.abs().amax(1) / 63
            layer.weight.copy_(torch.round(layer.weight / weight_scale[:, None]) * weight_scale[:, None])
            scales |= {f"{name}.weight_scale": weight_scale, f"{name}.input_scale": torch.tensor(0.05)}
    source, out = (Path(_SCRATCH.name) / f"{kind}-{part}" for part in ("source", "checkpoint"))
    source.mkdir()
    out.mkdir()
    save(model, source, out, "drawn")
    assert load(out) is not None
    save_file(scales, out / "quantization.safetensors")
    settings = {
        "schema": 1,
        "scheme": "w8a8",
        "weight_bits": 8,
        "layers": {name: {"weight_bits": 8} for name in layers},
        "float_layers": {},
    }
    (out / "quantization.json").write_text(json.dumps(settings))
    return out


def _preprocessor(kind: str) -> Preprocessor:
    task = TASKS.get(kind, "text-classification")
    labels = ("a", "b", "c") if "classification" in task else ()
    if kind == "vit":
        half, size = [0.5] * 3, {"height": 12, "width": 12}
        image = {"do_resize": True, "size": size, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "num_channels": 3}
        image |= {"do_normalize": True, "image_mean": half, "image_std": half, "do_convert_rgb": True, "do_center_crop": False}
        return Preprocessor("image", names(kind), labels, task, image=image)
    start = 0 if kind == "t5" else None
    return Preprocessor("text", names(kind), labels, task, LENGTH, (LENGTH,), pad_token_id=0, decoder_start_token_id=start)
