"""A tiny sentiment classifier with tokenizer, float and quantized, and a context to export it in."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from export.graph.onnx import export_float
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.measure.answers import save_predictions
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import LayerScales, levels, on_grid, weight_scale
from foundation.stage.context import Context
from tests.told import Told

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [
    "a",
    "bad",
    "dull",
    "film",
    "fine",
    "good",
    "great",
    "hate",
    "it",
    "like",
    "love",
    "movie",
    "not",
    "poor",
    "the",
    "this",
    "very",
    "was",
]
LENGTH = 16
TARGET = Target(engines=("openvino", "onnxruntime"), batch_sizes=(1, 4), sequence_lengths=(8,), threads=1)
_SCRATCH = tempfile.TemporaryDirectory(prefix="sentiment-")  # removed when the test run ends


def drawn(kind: Any, config: Any) -> Any:
    """Returns a model of this class with weights that are large enough to tell texts apart, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        for parameter in model.parameters():
            parameter.data += (0.3 if parameter.ndim > 1 else 0.1) * torch.randn(parameter.shape)
    return model


@functools.cache
def checkpoint(layers: int = 2) -> Path:
    """Writes the float checkpoint once for all tests, which leave it alone."""
    folder = Path(_SCRATCH.name) / f"float-{layers}"
    config = BertConfig(
        vocab_size=len(SPECIALS + WORDS), hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
        architectures=["BertForSequenceClassification"],
    )  # fmt: skip
    drawn(BertForSequenceClassification, config).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


@functools.cache
def quantized(bits: int = 7) -> Path:
    """Writes the checkpoint with the linear layers of its encoder in int8."""
    folder = Path(_SCRATCH.name) / f"int{bits}"
    folder.mkdir()
    model, scales, largest = load(checkpoint()), {}, levels(bits)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".encoder." in name:
            scale_O = weight_scale(layer.weight.data, largest)
            layer.weight.data = on_grid(layer.weight.data, scale_O, largest)
            scales[name] = LayerScales(scale_O, torch.tensor(0.03), bits)
    save(model, checkpoint(), folder, "Quantized")
    save_quantization(folder, scales, {"classifier": "head"})
    return folder


@functools.cache
def graph(path: Path) -> Path:
    """Writes the float ONNX model of one of the checkpoints once for all tests: tracing takes seconds."""
    return export_float(
        Checkpoint(path), Checkpoint(path).preprocessor("text-classification", LENGTH, TARGET), Path(_SCRATCH.name) / f"{path.name}.onnx"
    )


@functools.cache
def answers(path: Path, count: int) -> Path:
    """Writes what torch answers to the first rows, as the pipeline hands it to the stage."""
    file = Path(_SCRATCH.name) / f"{path.name}-{count}.safetensors"
    logits = predict(load(path), Checkpoint(path).preprocessor("text-classification", LENGTH, TARGET), rows(count), 4)
    save_predictions(file, logits, labels(count))
    return file


def labels(count: int) -> ClassIds:
    """Returns random labels."""
    return ClassIds(np.random.default_rng(1).integers(0, 2, count))


def rows(count: int) -> list[str]:
    """Returns made-up sentences of 1 to 20 words; the longest are truncated."""
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, random.integers(1, 21))) for _ in range(count)]


def context(
    scratch: Path,
    checkpoints: dict[str, Path],
    target: Target = TARGET,
    count: int = 40,
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> Context:
    """Returns a context whose labels are random; each checkpoint is made of the one before, unless `inputs` names another."""
    split = Split(rows(count), labels(count))
    data = Data(split, split, split, ("negative", "positive"))
    before = dict(zip(checkpoints, ["model", *checkpoints], strict=False)) | dict(inputs)
    artifacts = {name: Artifact(path, {"id": name, "digest": name, "parents": [before[name]]}) for name, path in checkpoints.items()}
    return Context("text-classification", data, LENGTH, target, 0, Told(), scratch, artifacts)


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIALS + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **names).save_pretrained(folder)
