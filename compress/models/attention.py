"""Finds the query, key, value and output layers of every block's attention by tracing, without relying on names or weights.

The backbone runs once on the meta device, on eight tokens or one image, and all torch calls are recorded. Every Transformers model passes
queries, keys and values to its attention function as positional arguments. At that call the trace answers three questions:

    which layer produced it      a layer marks its output; results computed from it without another layer inherit the mark
    which part of the output     if one layer produces all three (GPT-2), the offset of the part in that layer's output
    which layer reads the result the first layer that reads a value computed from the attention output

`transformed` means that queries or keys are modified between their layer and attention (RoPE, a norm per head): whole heads can still be
pruned, single dimensions of a head cannot. Not supported: models whose attention does not call this function (DeBERTa), cross-attention,
values with another head dimension than the queries.
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
from compress.models.images import image_shape
from compress.models.library import REFUSED
from compress.models.meta import on_meta_device

TRACING = "tracing"
TOKENS = 8
UNTRACEABLE = "the attention of this {} cannot be traced, so its heads cannot be identified"


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

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.key_value_heads

    def size(self, what: str) -> int:
        """Returns the total width of all heads of `what`: query, key or value."""
        return (self.heads if what == "query" else self.key_value_heads) * self.head_dim


def find_attentions(model: nn.Module, key: str) -> Mapping[int, Attention]:
    """Returns the attention layers of every block, by block number.

    Args:
        model: A Transformers model; its weights are not read and may be on the meta device.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: The layers cannot be identified.
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
    except REFUSED as error:  # a model class with its own list of attention implementations (GPT-Neo)
        raise InputError(f"{key}: {UNTRACEABLE.format(config.model_type)}") from error
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
            raise InputError(f"{key}: this {config.model_type} does not have exactly one attention per block; that is not supported")
        about = f"{key}: the {{}} layer of attention in this {config.model_type}"
        found[number] = _resolve(call, names[call.module], trace, about)
    if len(found) != len(blocks):
        raise InputError(f"{key}: {UNTRACEABLE.format(config.model_type)}")
    return found


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer: `nn.Linear` or the transposed `Conv1D`."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def out_axis(layer: nn.Module) -> int:
    """Returns the output axis of a linear layer's weight; the other one is the input axis."""
    return 0 if isinstance(layer, nn.Linear) else 1


def probe(config: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Returns random inputs, one row, for models with this config."""
    if hasattr(config, "vocab_size"):
        return {"input_ids": torch.randint(config.vocab_size, (1, TOKENS), generator=generator)}
    return {"pixel_values": torch.randn(1, *image_shape(config), generator=generator)}


def _traced_config(config: Any) -> Any:
    changed = copy.deepcopy(config)
    changed._attn_implementation = TRACING
    changed._experts_implementation = "batched_mm"  # the others read values, which meta tensors lack, or need bfloat16
    changed.use_cache = False
    return changed


def _run(model: Any, trace: _Trace, key: str) -> None:
    """Runs the backbone only: what a task head does may depend on values."""
    with on_meta_device():
        _run_on_meta(model, trace, key)


def _run_on_meta(model: Any, trace: _Trace, key: str) -> None:
    inputs = probe(model.config)
    # A 4-D mask is used unchanged; without a mask some models read the values of positions. Others accept 2-D masks only: second try.
    masks = [{}] if "pixel_values" in inputs else [{"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS)}, {}]
    problems: list[Exception] = []
    for mask in masks:
        trace.clear()
        token = _TRACE.set(trace)
        try:
            with torch.inference_mode(False), torch.no_grad(), trace:  # inference mode does not record which tensor is a view of which
                model.base_model(**inputs, **mask)
        except REFUSED as error:
            problems.append(error)
        else:
            return
        finally:
            _TRACE.reset(token)
    raise InputError(f"{key}: {UNTRACEABLE.format(model.config.model_type)}") from problems[-1]


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
    """Records, for all torch calls, which layers a tensor comes from and which tensors a layer reads."""

    def __init__(self, layers: Mapping[int, str]) -> None:
        super().__init__()
        self.layers = layers
        self.clear()

    def clear(self) -> None:
        self.marks: dict[int, frozenset[str]] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that ids stay unique
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
        # a view or transpose of the weight itself is not an output of the layer
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
    """Replaces attention: records its arguments and returns an empty result `[b, L, heads, d]` with a mark of its own."""
    trace = _TRACE.get()
    call = _Call(len(trace.calls), module, query, key, value, scaling)
    trace.calls.append(call)
    rows, heads, length, _ = query.shape
    output = query.new_empty(rows, length, heads, value.shape[-1])
    trace.mark(output, frozenset({_mark(call)}))
    return output, None


def _mark(call: _Call) -> str:
    return f"attention {call.number}"


def _resolve(call: _Call, name: str, trace: _Trace, what: str) -> Attention:
    made = {"query": call.query, "key": call.key, "value": call.value}
    parts: dict[str, tuple[str, int]] = {}
    transformed = False
    for part, tensor in made.items():
        marks = trace.marks.get(id(tensor), frozenset())
        layer = next(iter(marks)) if len(marks) == 1 else None
        size = tensor.shape[1] * tensor.shape[3]
        output = trace.outputs.get(layer) if layer else None
        if layer is None or output is None:
            raise InputError(f"{what.format(part)} cannot be identified")
        is_view = trace.base(tensor) is trace.base(output) and tensor is not output
        place = tensor.storage_offset() if is_view else 0
        if output.shape[-1] % size or place % size or (output.shape[-1] != size and not is_view):
            raise InputError(f"{what.format(part)} cannot be identified")
        transformed |= not is_view
        parts[part] = layer, place // size
    readers = list(dict.fromkeys(trace.readers.get(_mark(call), [])))
    if len(readers) != 1 or call.value.shape[-1] != call.query.shape[-1]:
        raise InputError(f"{what.format('output')} cannot be identified")
    _, heads, length, head_dim = call.query.shape
    scaling = head_dim**-0.5 if call.scaling is None else float(call.scaling)
    return Attention(name, parts, readers[0], scaling, heads, call.key.shape[1], head_dim, length, transformed)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and maps."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
