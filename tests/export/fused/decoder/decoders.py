"""Tiny quantized decoders, what torch answers for them, and what the kernels answer.

What runs kernels is called in the process of the fixture `interpreted`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from export.fused.decoder.forward import Decoder
from export.fused.decoder.parts import decoder_plan
from export.fused.decoder.plan import read_decoder, write_decoder
from export.fused.decoder.texts import Texts, greedy
from export.fused.layers import Probe
from export.fused.rows import filled, pack
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import with_linears
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int4 import Int4Scales, group_range
from foundation.schemes.int8 import DynamicInt8Linear, DynamicScales, Int8Linear, LayerScales, levels, on_grid_of, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.tables import on_table_grid, row_scale, save_tables, table_modules
from tests.export.fused.encoders import Again

LENGTH = 24
"""Most tokens of a text."""
WORDS, GROUP = 50, 32
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5,
}  # fmt: skip
CONFIGS = {
    "gpt2": lambda **more: transformers.GPT2Config(
        **{
            "vocab_size": WORDS,
            "n_positions": LENGTH,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_inner": 96,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **more,
        }
    ),
    "llama": lambda **more: transformers.LlamaConfig(**{**LLAMA, **more}),
}


@dataclass(frozen=True)
class Shape:
    """What is special about a decoder."""

    family: str = "gpt2"
    scheme: str = "w8a8"
    floats: Collection[str] = ()
    """Ends of the names of layers that stay float."""
    smooth: Collection[str] = ()
    """Ends of the names of layers whose inputs are smoothed."""
    uneven: Collection[str] = ()
    """Ends of the names of layers with a scale of their own for an input that others read too."""
    head: bool = False
    """Whether the head is int8, too."""
    tables: bool = False
    """Whether the words, and a head of its own, have int8 rows."""
    config: Mapping[str, Any] | None = None


def checkpoint(folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Writes a quantized checkpoint whose scales fit what its layers read."""
    torch.manual_seed(seed)
    config = CONFIGS[shape.family](**(shape.config or {}))
    model: Any = with_linears(transformers.AutoModelForCausalLM.from_config(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) if parameter.ndim > 1 else parameter + 0.1 * torch.randn(parameter.shape))
    source, out = folder / "float", folder / "int8"
    config.save_pretrained(source)
    out.mkdir()
    stays = (*shape.floats, *(() if shape.head else ("lm_head",)), "\0")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = {name: module for name, module in layers.items() if not name.endswith(stays)}
    largest = largest_inputs(model, layers)
    scales: dict[str, Any] = {}
    for name, layer in layers.items():
        weight = layer.weight.data
        smooth = torch.rand(layer.in_features) + 0.5 if name.endswith((*shape.smooth, "\0")) else None
        if shape.scheme == "w8a16":
            scales[name] = WeightScales(weight_scale(weight, levels(8)))
            layer.weight.data = scales[name].on_grid(weight)
            continue
        if shape.scheme == "w4a16":
            scales[name] = Int4Scales.of_grid(group_range(weight, GROUP), GROUP)
            layer.weight.data = scales[name].on_grid(weight)
            continue
        own = weight_scale(weight if smooth is None else weight * smooth, levels(8))
        scale = torch.tensor(largest[name] / 127 * (1.5 if name.endswith((*shape.uneven, "\0")) else 1.0))
        scales[name] = DynamicScales(own, 8, smooth) if shape.scheme == "w8a8-dynamic" else LayerScales(own, scale, 8, smooth)
        layer.weight.data = on_grid_of(weight, scales[name])
    tables = {name: row_scale(module.weight.data) for name, module in table_modules(model).items() if shape.tables}
    for name, scale in tables.items():
        module: Any = model.get_submodule(name)
        module.weight.data = on_table_grid(module.weight.data, scale)
    save(model, source, out, "Quantized")
    save_quantization(out, scales, {"lm_head": "head"})
    save_tables(out, tables)
    return out


def largest_inputs(model: Any, layers: Mapping[str, nn.Module]) -> dict[str, float]:
    """Returns 0.9 of the largest number that each layer reads, so that some are cut."""
    found: dict[str, float] = {}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, inputs, name=name: found.update({name: 0.9 * float(inputs[0].abs().max())}))
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(texts([LENGTH, LENGTH - 1])["input_ids"]))
    for layer in layers.values():
        layer._forward_pre_hooks.clear()
    return found


def texts(lengths: Sequence[int], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Returns random padded texts of these lengths."""
    random, longest = np.random.default_rng(seed), max(lengths)
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": np.where(mask == 1, random.integers(3, WORDS, mask.shape), 0), "attention_mask": mask}


def in_torch(folder: Path, given: Mapping[str, NDArray[Any]]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """Returns the logits of all tokens [T, V], and what each int8 layer read: floats and codes [T, I], and their scale."""
    model: Any = load(folder)
    read: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def keep(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0][0]
        smoothed = x if layer.input_smooth is None else x * layer.input_smooth.reciprocal()
        codes, scale = layer.codes(x) if isinstance(layer, DynamicInt8Linear) else (layer.codes(x), layer.input_scale.expand(len(x), 1))
        read.setdefault(layer.name, []).append((smoothed, codes, scale))

    for module in model.modules():
        if isinstance(module, Int8Linear | DynamicInt8Linear):
            module.register_forward_pre_hook(keep)
    logits = []
    with torch.inference_mode():
        for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True):  # one text at a time: no padding, no mask
            logits.append(model(input_ids=torch.from_numpy(ids[mask == 1])[None], use_cache=False).logits[0])
    joined = {name: tuple(map(torch.cat, zip(*parts, strict=True))) for name, parts in read.items()}
    return torch.cat(logits), joined  # type: ignore[return-value]


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns the decoder of a checkpoint, from the file of its plan."""
    path = folder / "plan.safetensors"
    write_decoder(decoder_plan(Checkpoint(folder)), path)
    return Decoder(read_decoder(path), torch.device("cpu"), dtype)


@dataclass(frozen=True)
class Answers:
    """What the kernels answer."""

    logits: Tensor
    """float32 [T, V]."""
    probes: dict[str, Probe]


def in_kernels(folder: Path, given: Mapping[str, NDArray[Any]], dtype: torch.dtype = torch.float32) -> Answers:
    """Runs the plan of a checkpoint, read back from its file."""
    decoder = decoder_of(folder, dtype)
    return Answers(*decoder.probe(pack(given, decoder.limits)))


@dataclass(frozen=True)
class Written:
    """How texts are written."""

    slots: int = 4
    tokens: int = 10
    reverse: bool = False
    """Whether pages are taken from the last one on."""
    record: bool = False


def greedy_in_torch(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Returns the most likely tokens behind each prompt, every one from the whole text."""
    model: Any = load(folder)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(tokens):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            answers.append(ids[len(prompt) :])
    return answers


def greedy_in_kernels(folder: Path, prompts: Sequence[Sequence[int]], ways: Sequence[Written]) -> list[list[list[int]]]:
    """Returns the same from a cache of pages, written in several ways."""
    decoder, answers = decoder_of(folder), []
    for way in ways:
        pages = -(-256 // way.slots)
        order = range(pages, 0, -1) if way.reverse else None
        texts = Texts(decoder, 256, Again if way.record else None, way.slots, order)
        answers.append(greedy(texts, prompts, way.tokens))
    return answers


@dataclass(frozen=True)
class Ways:
    """What the head reads [T, D] of the same texts in several ways."""

    packed: Tensor
    alone: Tensor
    """Each text by itself, one after another."""
    filled: Tensor
    """Filled up with tokens and texts of nobody."""
    shorter: Tensor
    """The beginning of the first text."""
    other_end: Tensor
    """The first text with other tokens behind this beginning."""


def in_ways(folder: Path, given: Mapping[str, NDArray[Any]]) -> Ways:
    """Runs the same texts in several ways."""
    decoder = decoder_of(folder)
    rows = pack(given, decoder.limits)
    ends = rows.start.tolist()
    texts_of = [rows.word[start:end].numpy()[None] for start, end in pairwise(ends)]
    half = ends[1] // 2
    other = texts_of[0].copy()
    other[:, half:] = (other[:, half:] + 7) % WORDS

    def states(ids: NDArray[Any]) -> Tensor:
        return decoder.states(pack({"input_ids": ids}, decoder.limits))

    return Ways(
        packed=decoder.states(rows),
        alone=torch.cat([states(ids) for ids in texts_of]),
        filled=decoder.states(filled(rows, len(rows.word) + 5, rows.sequences + 2))[: len(rows.word)],
        shorter=states(texts_of[0][:, :half]),
        other_end=states(other),
    )
