"""The layers around the attention of every block, found without a name and without a weight.

The backbone runs once on the meta device, eight tokens or one image, and every function that torch calls is watched. Where every
Transformers model hands queries, keys and values over by position, at the attention function, three questions are answered:

    which layer made it    a layer marks its output, and everything that is computed from it without another layer inherits the mark
    which part of it       where one layer makes all three (GPT-2), the place of the piece in that layer's output
    who takes the result   the first layer that reads what is computed from the output of attention

`turned` says that something happens between a layer and attention (RoPE, a norm over each head): whole heads may still be taken out, single
numbers of a head not. Left out: models whose attention does not go through this function (DeBERTa), cross-attention, keys and values of
another width than the queries.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.core.errors import InputError
from compress.models.blocks import Kind, repeated_blocks
from compress.models.library import REFUSED

TRACING = "tracing"
TOKENS = 8
UNSEEN = "the attention of this {} cannot be looked at; its heads cannot be told apart"


@dataclass(frozen=True)
class Attention:
    """The layers around the attention of one block."""

    module: str
    """Name of the module that calls the attention function."""
    parts: dict[str, tuple[str, int]]
    """For query, key and value: name of the layer, and which of its equal parts makes it (0 where it makes nothing else)."""
    output: str
    """Name of the layer that takes what attention gives."""
    scaling: float
    """Factor of the scores Q K^T."""
    heads: int
    """Heads of the queries."""
    key_value_heads: int
    """Heads of keys and values; fewer where several queries share one."""
    head_dim: int
    """Numbers of a head."""
    tokens: int
    """Tokens of the row that was traced: those of an image; of text, where they depend on the row, `TOKENS`."""
    turned: bool
    """Whether queries or keys are changed between their layer and attention."""

    @property
    def group(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.heads // self.key_value_heads

    def size(self, what: str) -> int:
        """Returns the numbers of all heads of query, key or value."""
        return (self.heads if what == "query" else self.key_value_heads) * self.head_dim


def find_attentions(model: nn.Module, key: str) -> Mapping[int, Attention]:
    """Returns the layers around the attention of every block, by block.

    Args:
        model: A Transformers model; its weights are not looked at, and may lie on the meta device.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: They cannot be told.
    """
    return _attentions(Kind.of(model), key)


@functools.lru_cache(maxsize=64)
def _attentions(kind: Kind, key: str) -> Mapping[int, Attention]:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TRACING, _attention)
    AttentionMaskInterface.register(TRACING, lambda *args, **kwargs: None)
    config = kind.config
    try:
        model = kind.make(_traced_config(config)).eval()
    except REFUSED as error:  # a class with attentions of its own by name (GPT-Neo)
        raise InputError(f"{key}: {UNSEEN.format(config.model_type)}") from error
    prefix, blocks = repeated_blocks(model, key)
    layers = {f"{prefix}.{name}": module for name, module in blocks.named_modules() if is_layer(module)}
    trace = _Trace({id(module.weight): name for name, module in layers.items()})
    _run(model, trace, key)
    block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
    names = {module: name for name, module in model.named_modules()}
    found: dict[int, Attention] = {}
    for call in trace.calls:
        number = block_of.get(call.module)
        if number is None or number in found:
            raise InputError(f"{key}: this {config.model_type} has other attention than one for each block; that is not handled")
        about = f"{key}: the layer that makes the {{}} of attention in this {config.model_type}"
        found[number] = _resolve(call, names[call.module], trace, about)
    if len(found) != len(blocks):
        raise InputError(f"{key}: {UNSEEN.format(config.model_type)}")
    return found


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer, stored either way round."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def out_axis(layer: nn.Module) -> int:
    """Returns the axis of the weight of a linear layer that runs over its outputs; the other one runs over its inputs."""
    return 0 if isinstance(layer, nn.Linear) else 1


def probe(config: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Returns random inputs of one row for the models of a config."""
    if hasattr(config, "vocab_size"):
        return {"input_ids": torch.randint(config.vocab_size, (1, TOKENS), generator=generator)}
    size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size, config.image_size)
    return {"pixel_values": torch.randn(1, config.num_channels, *size, generator=generator)}


def _traced_config(config: Any) -> Any:
    changed = copy.deepcopy(config)
    changed._attn_implementation = TRACING
    changed._experts_implementation = "batched_mm"  # the others look at values, which a meta tensor has not, or want bfloat16
    changed.use_cache = False
    return changed


def _run(model: Any, trace: _Trace, key: str) -> None:
    """Runs the backbone: what a head does with the answers may depend on values."""
    with torch.device("meta"):
        inputs = probe(model.config)
    # a mask of four axes is taken as it is; without one some models look at the values of positions. Others know masks of two axes alone
    masks = [{}] if "pixel_values" in inputs else [{"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS, device="meta")}, {}]
    problems: list[Exception] = []
    for mask in masks:
        trace.clear()
        token = _TRACE.set(trace)
        try:
            with torch.inference_mode(False), torch.no_grad(), trace:  # inference mode does not say what is a view of what
                model.base_model(**inputs, **mask)
        except REFUSED as error:
            problems.append(error)
        else:
            return
        finally:
            _TRACE.reset(token)
    raise InputError(f"{key}: {UNSEEN.format(model.config.model_type)}") from problems[-1]


@dataclass(frozen=True)
class _Call:
    """One call of the attention function."""

    number: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None


class _Trace(TorchFunctionMode):
    """Watches what torch calls: which layers each tensor comes from, and which tensors each layer reads."""

    def __init__(self, layers: Mapping[int, str]) -> None:
        super().__init__()
        self.layers = layers
        self.clear()

    def clear(self) -> None:
        self.marks: dict[int, frozenset[str]] = {}
        self.alive: list[Tensor] = []  # so that an id is one tensor
        self.outputs: dict[str, Tensor] = {}
        self.readers: dict[str, list[str]] = {}
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = list(tensors_in((args, tuple((kwargs or {}).values()))))
        marks = frozenset().union(*(self.marks.get(id(tensor), frozenset()) for tensor in given))
        layer = next((self.layers[id(tensor)] for tensor in given if id(tensor) in self.layers), None)
        # what a view or a transpose makes of the weight itself is no output of the layer
        if layer is not None and len(given) > 1:
            for mark in marks:
                self.readers.setdefault(mark, []).append(layer)
            marks = frozenset({layer})
        for tensor in tensors_in(result):
            self.mark(tensor, marks)
            if layer is not None and len(given) > 1:
                self.outputs[layer] = tensor
        return result

    def mark(self, tensor: Tensor, marks: frozenset[str]) -> None:
        self.marks[id(tensor)] = marks
        self.alive.append(tensor)

    def base(self, tensor: Tensor) -> Tensor:
        return tensor if tensor._base is None else tensor._base


_TRACE: ContextVar[_Trace] = ContextVar("trace")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for attention: keeps its arguments and returns an empty result `[b, L, heads, d]` that is marked by its module."""
    trace = _TRACE.get()
    call = _Call(len(trace.calls), module, query, key, value, scaling)
    trace.calls.append(call)
    rows, heads, length, _ = query.shape
    given = query.new_empty(rows, length, heads, value.shape[-1])
    trace.mark(given, frozenset({_mark(call)}))
    return given, None


def _mark(call: _Call) -> str:
    return f"attention {call.number}"


def _resolve(call: _Call, name: str, trace: _Trace, what: str) -> Attention:
    made = {"query": call.query, "key": call.key, "value": call.value}
    parts: dict[str, tuple[str, int]] = {}
    turned = False
    for part, tensor in made.items():
        marks = trace.marks.get(id(tensor), frozenset())
        layer = next(iter(marks)) if len(marks) == 1 else None
        size = tensor.shape[1] * tensor.shape[3]
        output = trace.outputs.get(layer) if layer else None
        if layer is None or output is None:
            raise InputError(f"{what.format(part)} cannot be told")
        is_view = trace.base(tensor) is trace.base(output) and tensor is not output
        place = tensor.storage_offset() if is_view else 0
        if output.shape[-1] % size or place % size or (output.shape[-1] != size and not is_view):
            raise InputError(f"{what.format(part)} cannot be told")
        turned |= not is_view
        parts[part] = layer, place // size
    readers = list(dict.fromkeys(trace.readers.get(_mark(call), [])))
    if len(readers) != 1 or call.value.shape[-1] != call.query.shape[-1]:
        raise InputError(f"{what.format('output')} cannot be told")
    _, heads, length, head_dim = call.query.shape
    scaling = head_dim**-0.5 if call.scaling is None else float(call.scaling)
    return Attention(name, parts, readers[0], scaling, heads, call.key.shape[1], head_dim, length, turned)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and maps."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
