"""Finds the query, key, value and output layers of every block's attention by tracing, without relying on names or weights.

The backbone runs on eight tokens, one image or one sound, on the meta device or, where it is small, on the CPU, and all torch calls are
recorded (`foundation.models.architecture.trace`). Most models of Transformers pass queries, keys and values to an attention function as
positional arguments; in the others the softmax between two matrix products reveals them. The trace answers three questions:

    which layer produced it      a layer marks its output; results computed from it without another layer inherit the mark
    which part of the output     if one layer produces all three (GPT-2), the offset of the part in that layer's output
    which layer reads the result the first layer that reads a value computed from the attention output

`transformed` means that queries or keys are modified between their layer and attention (RoPE, a norm per head): whole heads can still be
pruned, single dimensions of a head cannot. A decoder that reads an encoder has two attentions in each block: it is run on fewer tokens than
the encoder, so that attention with other numbers of queries and keys is the one that reads the encoder. Not supported: attention without a
softmax, values with another head dimension than the queries.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import Kind, block_of, blocks_of
from foundation.models.architecture.trace import TRACE, Call, Trace
from foundation.models.inputs.images import image_shape
from foundation.models.inputs.sounds import INPUT, least_samples, reads_sounds, spectrogram_shape
from foundation.models.layers.prefix import TRACING
from foundation.models.library import REFUSED, quiet
from foundation.models.meta import on_meta_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = 8
DECODER_TOKENS = 6
UNTRACEABLE = "the attention of this {} cannot be traced, so its heads cannot be identified"
UNSEEN = "{} of {} blocks of this {} have no attention between linear layers, so there are no heads that can be identified"


@dataclass(frozen=True)
class Attention:
    """The layers around the attention of one block."""

    module: str
    """Name of the module that calls the attention function."""
    parts: dict[str, tuple[str, int]]
    """For query, key and value: name of the producing layer, and which of its equal output parts it is (0 if there is only one)."""
    output: str
    """Name of the output projection, which reads the result of attention."""
    scaling: float
    """Factor of the scores Q K^T."""
    heads: int
    """Number of query heads."""
    key_value_heads: int
    """Number of key and value heads; fewer than `heads` in grouped-query attention."""
    head_dim: int
    """Dimension of a head."""
    tokens: int
    """Sequence length of the traced row: the patches of an image, or `TOKENS` for text."""
    transformed: bool
    """Whether queries, keys or values are modified between their layer and attention."""
    interleaved: bool = False
    """Whether the layer that makes query, key and value has them head by head: all of head 0, then all of head 1 (GPT-NeoX)."""

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.key_value_heads

    def size(self, what: str) -> int:
        """Returns the total width of all heads of `what`: query, key or value."""
        return (self.heads if what == "query" else self.key_value_heads) * self.head_dim


@dataclass(frozen=True)
class Attentions:
    """The attention layers of a model, by block number."""

    own: Mapping[int, Attention]
    """Attention of a block to its own tokens: every block has one."""
    cross: Mapping[int, Attention]
    """Attention of a decoder's block to the tokens of the encoder."""


def find_attentions(model: nn.Module, key: str) -> Attentions:
    """Returns the attention layers of every block.

    Args:
        model: A Transformers model; its weights are not read and may be on the meta device.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: The layers cannot be identified.
    """
    small = sum(weight.numel() for weight in model.parameters()) <= SMALL
    return _attentions(Kind.of(model), key, small)


@functools.lru_cache(maxsize=64)
def _attentions(kind: Kind, key: str, small: bool) -> Attentions:
    problems: list[InputError] = []
    for way in ON_CPU if small else WAYS:
        try:
            return _attentions_by(kind, way, key)
        except InputError as error:
            problems.append(error)
    # the most telling one
    raise min(problems, key=lambda problem: isinstance(problem, _Untraceable) + isinstance(problem, _NotRun))


class _Untraceable(InputError):
    """The model showed no attention."""


class _NotRun(_Untraceable):
    """The model could not be built or run."""


@dataclass(frozen=True)
class _Way:
    """A way of running a model to find its attention."""

    attention: str
    """Name of its attention function."""
    on_meta: bool
    """Whether it runs on the meta device; otherwise on the CPU, with weights that are not initialized."""


WAYS = (_Way(TRACING, True), _Way("eager", True), _Way("eager", False))
"""First the attention function, which shows the most; then the softmax of models that do not call it; at last models that read values."""
SMALL = 30_000_000
"""Parameters up to which a model runs on the CPU alone: on the meta device torch runs Python code, a millisecond for each operation."""
ON_CPU = (_Way(TRACING, False), _Way("eager", False))


def _attentions_by(kind: Kind, way: _Way, key: str) -> Attentions:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TRACING, _attention)
    AttentionMaskInterface.register(TRACING, lambda *args, **kwargs: None)
    config = kind.config
    try:
        model = kind.make(_traced_config(config, way), way.on_meta).eval()
    except REFUSED as error:  # a model class with its own list of attention implementations (GPT-Neo)
        raise _NotRun(key, UNTRACEABLE.format(config.model_type)) from error
    blocks = blocks_of(model, key)
    layers = {f"{name}.{inner}": module for name, block in blocks.items() for inner, module in block.named_modules() if is_layer(module)}
    trace = Trace({id(module.weight): name for name, module in layers.items()})
    with torch.random.fork_rng(devices=[]):  # what is drawn later does not depend on what was looked at
        _run(model, trace, way, key)
    numbers = {module: number for number, block in enumerate(blocks.values()) for module in block.modules()}
    names = {module: name for name, module in model.named_modules()}
    own: dict[int, Attention] = {}
    cross: dict[int, Attention] = {}
    for call in trace.calls:
        made = trace.output_of(call.value)
        inside = None if made is None else block_of(made[0], list(blocks))
        number = inside if call.module is None else numbers.get(call.module)
        alike = cross if call.query.shape[-2] != call.value.shape[-2] else own
        if number is None or number in alike:
            raise InputError(key, f"this {config.model_type} does not have exactly one attention per block", "that is not supported")
        about = f"the {{}} layer of attention in this {config.model_type}"
        alike[number] = _resolve(call, model, names[call.module] if call.module else None, trace, about, key)
    if len(own) != len(blocks):
        raise _Untraceable(key, UNSEEN.format(len(blocks) - len(own), len(blocks), config.model_type))
    return Attentions(own, cross)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer: `nn.Linear` or the transposed `Conv1D`."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def out_axis(layer: nn.Module) -> int:
    """Returns the output axis of a linear layer's weight; the other one is the input axis."""
    return 0 if isinstance(layer, nn.Linear) else 1


def probe(model: PreTrainedModel, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Returns random inputs, one row, for a model of Transformers; a decoder that reads an encoder gets fewer tokens than it."""
    config = model.config
    if reads_sounds(config):
        frames = least_samples(config) + (TOKENS - 1) * math.prod(getattr(config, "conv_stride", ()))
        return {INPUT: torch.randn(1, *(spectrogram_shape(config) or (frames,)), generator=generator)}
    if model.main_input_name != "pixel_values":
        inputs = {"input_ids": torch.randint(config.vocab_size, (1, TOKENS), generator=generator)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(config.vocab_size, (1, DECODER_TOKENS), generator=generator)
        return inputs
    return {"pixel_values": torch.randn(1, *image_shape(config), generator=generator)}


def _traced_config(config: PreTrainedConfig, way: _Way) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    changed._attn_implementation = way.attention
    changed._experts_implementation = "batched_mm"  # the others read values, which meta tensors lack, or need bfloat16
    changed.use_cache = False
    return changed


def _run(model: PreTrainedModel, trace: Trace, way: _Way, key: str) -> None:
    """Runs the backbone only: what a task head does may depend on values."""
    with on_meta_device() if way.on_meta else torch.device("cpu"), quiet():
        inputs = probe(model)
        # A 4-D mask is used unchanged; without a mask some models read the values of positions. Others accept 2-D masks only: last try.
        masks: list[dict[str, Tensor]] = [{}]
        if "input_ids" in inputs:
            masks = [{"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS)}, {}, {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}]
        problems: list[Exception] = []
        for mask in masks:
            trace.clear()
            token = TRACE.set(trace)
            try:
                with torch.inference_mode(False), torch.no_grad(), trace:  # inference mode does not record which tensor is a view of which
                    model.base_model(**inputs, **mask)
            except REFUSED as error:
                problems.append(error)
            else:
                return
            finally:
                TRACE.reset(token)
    raise _NotRun(key, UNTRACEABLE.format(model.config.model_type)) from problems[-1]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Replaces attention: records its arguments and returns an empty result `[b, L, heads, d]` with a mark of its own."""
    trace = TRACE.get()
    call = Call(len(trace.calls), module, query, key, value, scaling)
    trace.calls.append(call)
    rows, heads, length, _ = query.shape
    output = query.new_empty(rows, length, heads, value.shape[-1])
    trace.mark(output, frozenset({call.mark}))
    return output, None


def _resolve(call: Call, model: nn.Module, name: str | None, trace: Trace, what: str, path: str) -> Attention:
    made = {"query": call.query, "key": call.key, "value": call.value}
    head_dim = call.query.shape[-1]
    layers: dict[str, tuple[str, Tensor]] = {}
    for part, tensor in made.items():
        found = trace.output_of(tensor)
        if found is None or found[1].shape[-1] % head_dim:
            raise InputError(path, f"{what.format(part)} cannot be identified")
        layers[part] = found
    readers = list(dict.fromkeys(trace.readers.get(call.mark, [])))
    if len(readers) != 1 or call.value.shape[-1] != head_dim:
        raise InputError(path, f"{what.format('output')} cannot be identified")
    shares_layer = len({layer for layer, _ in layers.values()}) < len(layers)
    numbers = {part: tensor.shape[-3] for part, tensor in made.items()}
    if not shares_layer:  # keys that query heads share may have been repeated for them
        numbers = {part: output.shape[-1] // head_dim for part, (_, output) in layers.items()}
    if numbers["key"] != numbers["value"]:
        raise InputError(path, f"{what.format('key')} cannot be identified")
    parts: dict[str, tuple[str, int]] = {}
    interleaved = False
    for layer, output in dict(layers.values()).items():
        sizes = {part: numbers[part] * head_dim for part in layers if layers[part][0] == layer}
        begins = {part: trace.begin_of(made[part]) for part in sizes}
        places = _places(sizes, begins, output.shape[-1], numbers["key"])
        if places is None:
            raise InputError(path, f"{what.format(next(iter(sizes)))} cannot be identified")
        parts |= {part: (layer, place) for part, place in places[0].items()}
        interleaved |= places[1]
    transformed = any(not trace.is_view_of(made[part], layers[part][1]) for part in made)
    owner = name or _common([layer for layer, _ in layers.values()])
    scaling = call.scaling if call.scaling is not None else getattr(model.get_submodule(owner), "scaling", None)
    factor = float(scaling) if isinstance(scaling, int | float) else head_dim**-0.5
    length, parts = call.query.shape[-2], {part: parts[part] for part in made}
    return Attention(owner, parts, readers[0], factor, numbers["query"], numbers["key"], head_dim, length, transformed, interleaved)


def _places(sizes: Mapping[str, int], begins: Mapping[str, int | None], width: int, groups: int) -> tuple[dict[str, int], bool] | None:
    """Returns the order of the parts in the output of a layer, and whether they alternate head by head; None if that is unknown.

    Args:
        sizes: Width of each part: query, key or value.
        begins: Where each part begins, if it is not the whole output.
        width: Width of the output.
        groups: Number of key and value heads.
    """
    if len(sizes) == 1:
        return dict.fromkeys(sizes, 0), False
    known = {part: begin for part, begin in begins.items() if begin is not None}
    if len(known) < len(sizes) or sum(sizes.values()) != width:
        return None
    order = sorted(known, key=lambda part: known[part])
    for unit, alternate in ((1, False), (groups, True)):  # side by side, or a group of heads after the other
        expected, start = {}, 0
        for part in order:
            expected[part], start = start, start + sizes[part] // unit
        if expected == known:
            return {part: place for place, part in enumerate(order)}, alternate and groups > 1
    return None


def _common(names: list[str]) -> str:
    """Returns the name of the innermost module that holds all these layers."""
    paths = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return ".".join(paths[0][:shared])
