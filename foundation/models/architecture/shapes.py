"""Models whose shape a stock config cannot express: different heads or FFN sizes per layer, fewer heads of unchanged dimension.

If all layers are equal and the stock class can build them, the shape goes into the stock config keys and the checkpoint loads with
`AutoModel`. Otherwise config.json gets

    "compress_architecture": {"model_type": "bert", "head_dim": 64, "heads": [8, 12, ...], "key_value_heads": [8, 12, ...],
                              "scaling": [0.125, ...], "ffn": [1024, 3072, ...], "experts": [...], "prefix": 16,
                              "embedding_rank": 96}

with one entry per layer (the encoder's before the decoder's, which also has the heads that read the encoder, `cross`), and the
stock keys hold the nearest shape that the stock class can build. Loading builds the stock model from those keys and then resizes its
layers, which `foundation.models.architecture.structure` finds. One mechanism thus covers all architectures, without code in the checkpoint.
Attention modules only need their head counts updated: they split the outputs of their layers into heads of `head_dim`.

`model_type` in such a config.json is a sentence: Transformers rejects it as unknown, with an error that shows the sentence, which names
`foundation.models.checkpoint.load`. Not supported: layers without attention or without FFN, heads of different dimensions.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import nn

from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.labels.answer import Answer
from foundation.labels.spans import SpanAnswer
from foundation.labels.tasks import TASKS, Task
from foundation.labels.transcripts import TranscriptAnswer
from foundation.labels.vector import VectorAnswer
from foundation.models.architecture.attention import Attention, Attentions, find_attentions, is_layer, out_axis
from foundation.models.architecture.axes import OF_DECODER, Axes, Axis, axes_of, keys_of
from foundation.models.architecture.blocks import Kind, block_of, blocks_of
from foundation.models.architecture.dropped_tokens import drop_tokens
from foundation.models.architecture.merged_tokens import merge_tokens
from foundation.models.architecture.structure import Sizes, Structure, head_axes
from foundation.models.heads.embedding import embedding_class
from foundation.models.heads.reader import reader_class
from foundation.models.heads.towers import towers_class
from foundation.models.heads.transcriber import transcriber_class
from foundation.models.layers.conv1d import is_conv1d, with_linears
from foundation.models.layers.listed_experts import is_listed, keep_first, mend
from foundation.models.layers.low_rank_embedding import put_low_rank
from foundation.models.layers.prefix import put_prefix
from foundation.models.library import (
    REFUSED,
    depths_of,
    in_place_of,
    model_class,
    one_line,
    quiet,
    sizes_config,
    stock_auto,
    task_of,
    uninitialized,
    with_class,
)
from foundation.models.meta import on_meta_device
from foundation.models.own_shape import SHAPE_KEY, OwnShape, read_own
from foundation.models.tied import shared_as

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

COUNTS: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "num_heads", "n_heads"),
    "key_value_heads": ("num_key_value_heads",),
    "group": ("num_key_value_groups",),
    "head_dim": ("head_dim", "attention_head_size", "head_size"),
    "inner": ("all_head_size", "split_size"),
    "scaling": ("scaling", "scale"),
    "root": ("scale_attn",),
    "rotary": ("rotary_ndims",),
}
"""Attribute names of the head counts in attention modules; `root` is the square root of the head dimension, `rotary` a share of it."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts")
FFN_COUNTS = ("intermediate_dim", "intermediate_size")
HEADS: Mapping[type[Answer], Callable[[Any], Any]] = {
    VectorAnswer: embedding_class,
    SpanAnswer: reader_class,
    TranscriptAnswer: transcriber_class,
}
"""What builds the model class of an answer whose head is not the stock head."""
MARKED = "{}, in a shape of its own: load it with compress.api.load_checkpoint(folder)"


def auto_class(task: Task, config: PreTrainedConfig | None = None) -> Any:
    """Returns the Transformers auto class of a task, or a model class that builds vectors, spans, transcripts or per-layer sizes if needed.

    Args:
        task: The task.
        config: A Transformers config; if it has the key `SHAPE_KEY`, the class that builds such models is returned. Needed for
            vectors, spans and transcripts.
    """
    row = TASKS[task]
    if config is not None:
        mend(config.model_type)
    if row.two_towers:
        return towers_class(model_class(config, task))
    if (with_head := HEADS.get(type(row.answer))) is not None:
        made = with_head(model_class(config, task))
        return own_class(made) if getattr(config, SHAPE_KEY, None) else made
    auto = stock_auto(task)
    if config is None or not getattr(config, SHAPE_KEY, None):
        return auto
    classes = auto._model_mapping[type(config)]
    named = (config.architectures or [""])[0]
    stock = classes if not isinstance(classes, tuple) else next((c for c in classes if c.__name__ == named), classes[0])
    return own_class(stock)


def with_sizes(config: PreTrainedConfig, sizes: Sizes, key: str) -> PreTrainedConfig:
    """Returns a copy of a Transformers config with other sizes, using only stock keys if they can express the sizes.

    Args:
        config: A config, with or without `SHAPE_KEY`.
        sizes: The new sizes; they have as many layers as the config.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: A model of this shape cannot be built.
    """
    from huggingface_hub.errors import StrictDataclassError

    given = Kind.of_config(config)
    nearest: tuple[Any, bool] | None = None
    problem: Exception = ValueError("no such sizes")
    most = tuple(max(of_stack) for of_stack in _by_stack(config, tuple(map(max, sizes.heads, sizes.cross or sizes.heads))))
    equal = (max(most),) * len(most)  # where the width is split among the heads, they are as wide on both sides only if equally many
    counts = [tuple(of(number) for number in numbers) for numbers in (most, equal) for of in (int, partial(_dividing, sizes.hidden))]
    for heads in dict.fromkeys(counts):
        for head_dim in (False, True):
            candidate = _stock(config, sizes, heads, head_dim)
            try:
                type(candidate).from_dict(candidate.to_dict())  # configs validate themselves on construction
                built = _sizes_as_built(Kind.of_config(candidate), given, key)
            except (InputError, StrictDataclassError, *REFUSED) as error:
                problem = error
                continue
            if built.same(sizes):
                return candidate
            if nearest is None or (built.head_dim == sizes.head_dim) > nearest[1]:
                nearest = candidate, built.head_dim == sizes.head_dim
    if nearest is None:
        raise InputError(key, f"a {config.model_type} of this shape cannot be built ({one_line(problem)})") from problem
    changed = nearest[0]
    if not nearest[1] and any(attention.transformed for attention in find_attentions(on_meta(config), key).own.values()):
        changed.head_dim = sizes.head_dim  # rotary positions are made once for all layers, from the config
    try:
        own = OwnShape(
            model_type=config.model_type,
            head_dim=sizes.head_dim,
            heads=sizes.heads,
            key_value_heads=sizes.key_value_heads,
            scaling=sizes.scaling,
            ffn=sizes.ffn if any(sizes.ffn) else (),
            experts=sizes.experts if any(sizes.experts) else (),
            cross=sizes.cross,
            tokens=sizes.tokens,
            merged=sizes.merged and bool(sizes.tokens),
            first_stays=sizes.first_stays and sizes.merged and bool(sizes.tokens),
            prefix=sizes.prefix,
            embedding_rank=sizes.embedding_rank,
        )
    except ValidationError as error:
        lacking = f"layer {sizes.ffn.index(0)} of this {config.model_type} lacks the FFN that other layers have"
        raise InputError(key, lacking, "sizes per layer are not supported") from error
    setattr(changed, SHAPE_KEY, own.model_dump(mode="json", exclude_defaults=True))
    return changed


@functools.lru_cache(maxsize=256)
def _sizes_as_built(kind: Kind, like: Kind, key: str) -> Sizes:
    """Returns the sizes of the model of a config, whose axes are those of another config: they do not depend on its sizes."""
    return Structure.of(on_meta(kind.config), key, _axes_of_config(like, key)).sizes


@functools.lru_cache(maxsize=64)
def _axes_of_config(kind: Kind, key: str) -> Axes:
    return axes_of(on_meta(kind.config), key)


def on_meta(config: PreTrainedConfig) -> nn.Module:
    """Builds the model of a config on the meta device, with `nn.Linear` in place of `Conv1D`."""

    task = task_of(config)
    with on_meta_device(), uninitialized(), quiet():
        made: nn.Module = with_linears(auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)))
    return made


@functools.cache
def own_class(stock: Any) -> Any:
    """Returns a subclass of a stock model class that accepts configs with per-layer sizes and keeps the stock name.

    It has to be a class because Transformers calls the constructor itself when it loads weights.
    """

    class Resized(stock):  # type: ignore[misc]
        STOCK = stock

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            if getattr(config, SHAPE_KEY, None):
                _resize(self, getattr(config, SHAPE_KEY))

    return in_place_of(stock, Resized)


def remade(model: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Builds a model of the same class from another config, with new weights, tied where the model ties them, the same settings of
    generation, and `nn.Linear` in place of `Conv1D`."""
    stock: Any = getattr(type(model), "STOCK", type(model))
    with torch.random.fork_rng(devices=[]), quiet():
        made: Any = with_linears((own_class(stock) if getattr(config, SHAPE_KEY, None) else stock)(config))
    if getattr(model, "generation_config", None) is not None:
        made.generation_config = copy.deepcopy(model.generation_config)
    shared_as(made, model)
    remade: nn.Module = made
    return remade


def mark(folder: Path) -> None:
    """Marks a config.json with per-layer sizes, so that Transformers refuses it with a message that says how to load it."""
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    if raw.get(SHAPE_KEY):
        write_json(file, {**raw, "model_type": MARKED.format(raw[SHAPE_KEY]["model_type"])})


def _dividing(width: int, most: int) -> int:
    """Returns the largest divisor of `width` that is at most `most`."""
    return next(number for number in range(min(width, most), 0, -1) if width % number == 0)


def _by_stack(config: PreTrainedConfig, values: Sequence[int]) -> list[Sequence[int]]:
    """Splits values, one per layer, by the stacks of a config."""
    first = (depths_of(config) or (len(values),))[0]
    return [part for part in (values[:first], values[first:]) if part]


def _stock(config: PreTrainedConfig, sizes: Sizes, heads: Sequence[int], head_dim: bool) -> PreTrainedConfig:
    """Returns a stock config with these sizes, as far as its keys can express them; `heads` has one number for each stack."""
    changed = copy.deepcopy(config)
    if hasattr(changed, SHAPE_KEY):
        delattr(changed, SHAPE_KEY)
    own = sizes_config(changed)
    own.hidden_size, own.num_attention_heads = sizes.hidden, heads[0]
    of_decoder = OF_DECODER.get(own.attribute_map.get("num_attention_heads", ""))
    if len(heads) > 1 and of_decoder is not None:
        setattr(own, of_decoder, heads[1])
    if hasattr(own, "num_key_value_heads"):
        own.num_key_value_heads = max(1, heads[0] * sizes.key_value_heads[0] // sizes.heads[0])
    if head_dim:
        own.head_dim = sizes.head_dim
    ffn, vocabulary, experts = keys_of(changed, "ffn"), keys_of(changed, "vocabulary"), keys_of(changed, "experts")
    neurons = [max(part) for part in _by_stack(config, sizes.ffn)] if len(ffn) > 1 else [max(sizes.ffn)]
    wanted = [*zip(ffn, neurons, strict=False), *((name, sizes.vocabulary) for name in vocabulary)]
    for name, value in (*wanted, *((name, max(sizes.experts)) for name in experts)):
        if value:
            setattr(own, name, value)
    return changed


def _resize(model: PreTrainedModel, own: Any) -> None:
    """Resizes the layers of a stock model, in place."""
    shape = read_own(own, sum(depths_of(model.config) or ()), "checkpoint")
    stock = copy.copy(model)  # the same modules, under a config without `SHAPE_KEY`
    stock.config = copy.deepcopy(model.config)
    delattr(stock.config, SHAPE_KEY)
    axes, blocks = axes_of(stock, "checkpoint"), tuple(blocks_of(model, "checkpoint"))
    attentions = _stock_attentions(stock)
    _resize_per_head(model, axes, attentions.own[0], shape.head_dim)
    for block, attention in attentions.own.items():
        _resize_attention(model, attention, shape.heads[block], shape.key_value_heads[block], shape.head_dim, shape.scaling[block])
    for block, attention in attentions.cross.items():
        _resize_attention(model, attention, shape.cross[block], shape.cross[block], shape.head_dim, shape.scaling[block])
    for found, sizes, counts in ((axes.ffn, shape.ffn, FFN_COUNTS), (axes.experts, shape.experts, EXPERT_COUNTS)):
        for weight, axis in found if sizes else ():
            number = block_of(weight, blocks)
            assert number is not None, weight
            size = sizes[number]
            owner = _set_axis(model, (weight, axis), size * axes.repeated.get((weight, axis), 1))
            set_counts(owner, dict.fromkeys(counts, size))
    for block, attention in attentions.own.items() if shape.prefix else ():
        put_prefix(model, attention.module, shape.prefix, shape.key_value_heads[block] * shape.head_dim)
    if shape.embedding_rank:
        put_low_rank(model, shape.embedding_rank, "checkpoint")
    _cut_listed_experts(model, blocks, shape.experts)
    if shape.tokens and shape.merged:
        merge_tokens(blocks_of(model, "checkpoint"), shape.tokens, shape.first_stays)
    elif shape.tokens:
        drop_tokens(blocks_of(model, "checkpoint"), shape.tokens, sizes_config(model.config).hidden_size)


def _cut_listed_experts(model: nn.Module, blocks: Sequence[str], experts: Sequence[int]) -> None:
    """Leaves as many experts as each layer has, in place, where experts are modules; their routers have been resized."""
    for number, count in enumerate(experts):
        for module in list(model.get_submodule(blocks[number]).modules()):
            for listed in filter(is_listed, module.children()):
                keep_first(listed, count)
                module._is_hf_initialized = True  # type: ignore[assignment] # it would draw as many experts as the config has
                for other in (module, *module.children()):  # the router, too
                    set_counts(other, dict.fromkeys(EXPERT_COUNTS, count))


def _stock_attentions(stock: Any) -> Attentions:
    """Returns the attention layers of a stock model, whose config may hold the head dimension of the resized one."""
    try:
        return find_attentions(stock, "checkpoint")
    except InputError:
        if getattr(stock.config, "head_dim", None) is None:
            raise
        stock.config.head_dim = None
        return find_attentions(stock, "checkpoint")


def _resize_per_head(model: PreTrainedModel, axes: Axes, attention: Attention, head_dim: int) -> None:
    """Resizes what follows the dimension of a head but belongs to no layer of attention, such as the frequencies of rotary positions."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    hidden, layers = sizes_config(model.config).hidden_size, {id(module) for module in model.modules() if is_layer(module)}
    for weight, axis in axes.hidden:
        owner = model.get_submodule(weight.rpartition(".")[0])
        if isinstance(owner, nn.Conv1d) and owner.groups > 1:  # a group of channels is not a head; its weight may be under weight norm
            continue
        length = shapes[weight][axis]
        if length != hidden and id(owner) not in layers and (length * head_dim) % attention.head_dim == 0:
            _set_axis(model, (weight, axis), length * head_dim // attention.head_dim)


def _resize_attention(model: nn.Module, attention: Attention, heads: int, key_value_heads: int, head_dim: int, scaling: float) -> None:
    inner = {"query": heads * head_dim, "key": key_value_heads * head_dim, "value": key_value_heads * head_dim}
    for (weight, axis), parts in head_axes(model, attention).items():
        transposed = is_conv1d(model.get_submodule(weight.rpartition(".")[0])) and weight.endswith(".weight")
        _set_axis(model, (weight, 1 - axis if transposed else axis), sum(inner[what] for what, _ in parts))
    values = {
        "heads": heads,
        "key_value_heads": key_value_heads,
        "group": heads // key_value_heads,
        "head_dim": head_dim,
        "inner": heads * head_dim,
        "root": head_dim**0.5,
        "scaling": scaling,
    }
    module = model.get_submodule(attention.module)
    values["rotary"] = getattr(module, COUNTS["rotary"][0], 0) * head_dim // attention.head_dim
    own = getattr(module, "scaling", None)
    if isinstance(own, int | float) and own != attention.scaling:  # not the scaling that attention gets: OPT multiplies its queries by it
        values["scaling"] = own * (attention.head_dim / head_dim) ** 0.5
    set_counts(module, {name: value for count, value in values.items() for name in COUNTS[count]})


def set_counts(module: nn.Module, values: Mapping[str, float]) -> None:
    """Sets the attributes that the module already has as numbers."""
    for name, value in values.items():
        old = getattr(module, name, None)
        if isinstance(old, int | float):
            setattr(module, name, value)
        elif isinstance(old, torch.Tensor) and old.ndim == 0:
            setattr(module, name, torch.tensor(value, dtype=old.dtype, device=old.device))


def _set_axis(model: nn.Module, axis: Axis, size: int) -> Any:
    """Resizes one axis of a weight, counted as in `nn.Linear`, with new values; returns the module that owns the weight."""
    path, _, name = axis[0].rpartition(".")
    module: Any = model.get_submodule(path)
    old = getattr(module, name)
    number = 1 - axis[1] if is_conv1d(module) and name == "weight" else axis[1]  # axes are counted as in `nn.Linear`
    new = torch.zeros([size if dim == number else length for dim, length in enumerate(old.shape)], dtype=old.dtype, device=old.device)
    if new.ndim > 1 and not new.is_meta:  # where Python code would draw nothing
        new.normal_(std=getattr(model.config, "initializer_range", 0.02))
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))
    else:
        setattr(module, name, new)
    if name == "weight" and is_layer(module):
        inputs, outputs = (new.shape[1], new.shape[0]) if out_axis(module) == 0 else tuple(new.shape)
        set_counts(module, {"in_features": inputs, "out_features": outputs, "nx": inputs, "nf": outputs})
    return module
