"""Tiny w8a8 encoders of every shape that pruning leaves, what torch answers for them, and what the kernels answer.

What runs kernels is called in the process of the fixture `interpreted`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from export.fused.forward import Encoder
from export.fused.graphs import Graphs, Size
from export.fused.layers import Probe
from export.fused.parts import plan_of
from export.fused.plan import read_plan, write_plan
from export.fused.rows import Limits, Rows, filled, pack
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import EMBEDDING_KEY
from foundation.models.library import with_class
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import Int8Linear, LayerScales, levels, on_grid_of, weight_scale
from prune.sparsify.patterns import Blocks, mask
from prune.surgery import KeptUnits, shrink

LENGTH = 12
KEY = "model"
VECTORS: Task = "sentence-embedding"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, "num_labels": 3, "vocab_size": 50}
CONFIGS = {
    "bert": lambda **more: transformers.BertConfig(**{**SIZES, "max_position_embeddings": LENGTH, **more}),
    "roberta": lambda **more: transformers.RobertaConfig(**{**SIZES, "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1, **more}),
    "mpnet": lambda **more: transformers.MPNetConfig(**{**SIZES, "max_position_embeddings": LENGTH + 2, **more}),
    "electra": lambda **more: transformers.ElectraConfig(**{**SIZES, "max_position_embeddings": LENGTH, "embedding_size": 64, **more}),
    "distilbert": lambda **more: transformers.DistilBertConfig(
        vocab_size=50, dim=64, n_layers=2, n_heads=2, hidden_dim=96, max_position_embeddings=LENGTH, num_labels=3, **more
    ),
    "t5": lambda **more: transformers.T5Config(
        **{
            "vocab_size": 50,
            "d_model": 64,
            "d_kv": 32,
            "num_heads": 2,
            "num_layers": 2,
            "d_ff": 96,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 10,
            **more,
        }
    ),
}


@dataclass(frozen=True)
class Shape:
    """What is special about an encoder."""

    family: str = "bert"
    kept: Mapping[str, Any] | None = None
    """Units that stay, for `KeptUnits`: `heads` and `ffn` of each layer."""
    floats: Collection[str] = ()
    """Ends of the names of layers that stay float."""
    smooth: Collection[str] = ()
    """Ends of the names of layers whose inputs are smoothed."""
    uneven: Collection[str] = ()
    """Ends of the names of layers with a scale of their own for an input that others read too."""
    sparsity: float = 0.0
    """Of blocks of 32."""
    head: bool = False
    """Whether the head is int8, too."""
    config: Mapping[str, Any] | None = None
    vectors: Mapping[str, Any] | None = None
    """Settings of a model that answers with vectors; None for a classifier."""


def checkpoint(folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Writes a w8a8 checkpoint whose scales fit what its layers read."""
    torch.manual_seed(seed)
    config = CONFIGS[shape.family](**(shape.config or {}))
    model = built(config, shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) if parameter.ndim > 1 else parameter + 0.1 * torch.randn(parameter.shape))
    if shape.kept is not None:
        structure = Structure.of(model, KEY)
        everything = KeptUnits.everything(structure.sizes)
        model = shrink(model, structure, replace(everything, **shape.kept), KEY)
    source, out = folder / "float", folder / "int8"
    model.save_pretrained(source)
    out.mkdir()
    quantized(model, shape, source, out)
    return out


def built(config: Any, shape: Shape) -> Any:
    """Returns a model of a config: a classifier, or one of vectors."""
    if shape.vectors is None:
        return transformers.AutoModelForSequenceClassification.from_config(config)
    usual = {"pooling": "mean", "normalize": True, "dimensions": None, "prompt": "", "max_length": None}
    config.is_encoder_decoder = False
    setattr(config, EMBEDDING_KEY, {**usual, **shape.vectors})
    return auto_class(VECTORS, config).from_config(with_class(config, VECTORS))


def quantized(model: Any, shape: Shape, source: Path, out: Path) -> None:
    """Rounds the layers inside the blocks, or all, and saves."""
    blocks = tuple(f"{name}." for name in Structure.of(model, KEY).blocks)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and (shape.head or name.startswith(blocks))
    }
    layers = {name: module for name, module in layers.items() if not name.endswith(tuple(shape.floats) or ("\0",))}
    largest = largest_inputs(model, layers)
    scales = {}
    for name, layer in layers.items():
        weight = layer.weight.data
        if shape.sparsity:
            weight *= mask(torch.rand(weight.shape), Blocks(32, 32), shape.sparsity)
        smooth = torch.rand(layer.in_features) + 0.5 if name.endswith(tuple(shape.smooth) or ("\0",)) else None
        scale = torch.tensor(largest[name] / 127 * (1.5 if name.endswith(tuple(shape.uneven) or ("\0",)) else 1.0))
        scales[name] = LayerScales(weight_scale(weight if smooth is None else weight * smooth, levels(8)), scale, 8, smooth)
        layer.weight.data = on_grid_of(weight, scales[name])
    save(model, source, out, "Quantized")
    save_quantization(out, scales, {"classifier": "head"})


def largest_inputs(model: Any, layers: Mapping[str, nn.Module]) -> dict[str, float]:
    """Returns 0.9 of the largest number that each layer reads, so that some are cut."""
    found: dict[str, float] = {}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, inputs, name=name: found.update({name: 0.9 * float(inputs[0].abs().max())}))
    with torch.inference_mode():
        model(**tensors(features(6)))
    for layer in layers.values():
        layer._forward_pre_hooks.clear()
    return found


def features(rows: int, seed: int = 0, kinds: bool = False) -> dict[str, NDArray[Any]]:
    """Returns random padded rows of 1 to `LENGTH` tokens; the second one is full."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, LENGTH + 1, rows)
    lengths[1:2] = LENGTH
    mask_nL = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    ids = np.where(mask_nL == 1, random.integers(3, 50, mask_nL.shape), 1)
    found = {"input_ids": ids, "attention_mask": mask_nL}
    return found | ({"token_type_ids": random.integers(0, 2, ids.shape) * mask_nL} if kinds else {})


def tensors(given: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Returns features as tensors."""
    return {name: torch.from_numpy(array) for name, array in given.items()}


def in_torch(folder: Path, given: Mapping[str, NDArray[Any]]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """Returns the logits of the padded int8 model, and what each int8 layer read: floats and codes [T, I] of tokens, and their scale."""
    model: Any = load(folder)
    there = torch.from_numpy(given["attention_mask"]) != 0
    read: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(layer: Int8Linear, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0][there] if inputs[0].ndim == 3 else inputs[0]  # the head reads the first tokens
        smoothed = x if layer.input_smooth is None else x * layer.input_smooth.reciprocal()
        read[layer.name] = smoothed, layer.codes(x), layer.input_scale

    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.register_forward_pre_hook(keep)
    with torch.inference_mode():
        return model(**tensors(given)).logits, read


@dataclass(frozen=True)
class Answers:
    """What the kernels answer."""

    logits: Tensor
    """float32 [n, C]."""
    probes: dict[str, Probe]


@dataclass(frozen=True)
class Ways:
    """The states of the first tokens, float32 [n, D], of the same rows in several ways, and their logits."""

    packed: Tensor
    logits: Tensor
    padded: Tensor
    """With the padding computed as sequences of its own."""
    padded_logits: Tensor
    alone: Tensor
    """The first rows, each by itself."""
    filled: Tensor
    """Filled up with tokens and sequences."""
    recorded_logits: Tensor
    """From a recording that was made of other rows."""


def in_kernels(folder: Path, given: Mapping[str, NDArray[Any]], dtype: torch.dtype = torch.float32) -> Answers:
    """Runs the plan of a checkpoint, read back from its file."""
    encoder = encoder_of(folder, dtype)
    return Answers(*encoder.probe(pack(given, encoder.limits)))


def in_ways(folder: Path, given: Mapping[str, NDArray[Any]]) -> Ways:
    """Runs the same rows in several ways."""
    encoder = encoder_of(folder)
    rows, spread = pack(given, encoder.limits), padded(given, encoder.limits)
    packed, with_padding = encoder.pooled(rows), encoder.pooled(spread)
    one, two = (pack({name: array[number : number + 1] for name, array in given.items()}, encoder.limits) for number in range(2))
    graphs = Graphs(encoder.forward, (Size(2 * LENGTH, 2),), encoder.device, Again)
    graphs.prepare(one)
    return Ways(
        packed=packed,
        logits=encoder.head(packed),
        padded=with_padding[::2],
        padded_logits=encoder.head(with_padding[::2].contiguous()),
        alone=torch.cat([encoder.pooled(one), encoder.pooled(two)]),
        filled=encoder.pooled(filled(rows, len(rows.word) + 5, rows.sequences + 2))[: rows.sequences],
        recorded_logits=graphs(rows),
    )


def encoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    """Returns the encoder of a checkpoint, from the file of its plan."""
    path = folder / "plan.safetensors"
    write_plan(plan_of(Checkpoint(folder)), path)
    return Encoder(read_plan(path), torch.device("cpu"), dtype)


def padded(given: Mapping[str, NDArray[Any]], limits: Limits) -> Rows:
    """Returns rows with their padding, which is a sequence of its own behind each row."""
    ids = torch.from_numpy(given["input_ids"])
    there = torch.from_numpy(given["attention_mask"]) != 0
    kinds = torch.from_numpy(given.get("token_type_ids", np.zeros_like(given["input_ids"])))
    begin = torch.arange(len(ids)) * ids.shape[1]
    start = torch.stack([begin, begin + there.sum(dim=1)], dim=1).flatten()
    position = (torch.arange(ids.shape[1]) + limits.first_position).repeat(len(ids))
    first = start.clamp(max=ids.numel() - 1)
    return Rows(ids.flatten(), kinds.flatten(), position, torch.cat([start, torch.tensor([ids.numel()])]).int(), first)


class Again:
    """Stands for a recording where there is no GPU: runs the pass again, on what its inputs hold by then."""

    def __init__(self, work: Any) -> None:
        self.work = work
        work()

    def replay(self) -> Tensor:
        output: Tensor = self.work()
        return output


def sizes_of_weights(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Returns kind, stored bytes and bytes of all codes of the weights of every int8 layer."""
    found = {}
    for layer in plan_of(Checkpoint(folder)).linears:
        if layer.is_int8:
            tensors = layer.tensors()
            stored = sum(tensors[name].nbytes for name in ("codes", "bitmap", "blocks") if name in tensors)
            module = load(folder).get_submodule(layer.name)
            found[layer.name] = type(layer.weight).__name__, stored, module.weight.numel()
    return found
