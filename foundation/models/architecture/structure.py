"""The structure of a Transformer: its blocks, the meaning of every weight axis, and the sizes of each layer.

    residual   channels of the residual stream, shared by the whole model
    heads      head dimensions of one block; the queries of a group share keys and values
    cross      head dimensions of the attention with which a block of a decoder reads the encoder
    ffn        FFN neurons of one block
    experts    experts of one MoE block
    vocabulary rows of the embedding, and of a language model's head

The blocks of an encoder-decoder are numbered through, the encoder's first (`foundation.models.architecture.blocks`): each list below has
one entry per block of the whole model.

Model surgery works on this structure (`prune.surgery`, `distill.width`), and `foundation.models.architecture.shapes` writes it into a
config. It is found on the meta device, without relying on names of models or weights (`foundation.models.architecture.attention`,
`foundation.models.architecture.axes`).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.attention import Attention, find_attentions, is_layer, out_axis
from foundation.models.architecture.axes import OF_DECODER, Axes, Axis, axes_of, size_of
from foundation.models.architecture.blocks import Kind, Stack, blocks_of, stacks_of
from foundation.models.layers.prefix import names_of
from foundation.models.library import REFUSED, sizes_config
from foundation.models.own_shape import SHAPE_KEY, embedding_rank_of, first_stays, merges, prefix_of, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")
HeadKind = Literal["heads", "cross"]
"""The attention of a block to its own tokens, and the attention of a decoder's block to the encoder."""
HeadAxes = Mapping[Axis, tuple[tuple[str, int], ...]]
"""The axes over the head dimensions of one attention, with the parts along each: query, key or value, and its position."""
HEAD_KINDS: tuple[HeadKind, ...] = ("heads", "cross")


@dataclass(frozen=True)
class Sizes:
    """The shape of a model, which surgery changes. Tuples have one entry per layer."""

    hidden: int
    """Channels of the residual stream."""
    vocabulary: int
    """Rows of the embedding; 0 for images."""
    head_dim: int
    """Dimension of a head."""
    heads: tuple[int, ...]
    """Query heads."""
    key_value_heads: tuple[int, ...]
    """Key and value heads."""
    scaling: tuple[float, ...]
    """Factor of the scores Q K^T."""
    ffn: tuple[int, ...]
    """FFN neurons, per expert if there are several."""
    experts: tuple[int, ...]
    """Experts; 0 for a layer with one FFN."""
    cross: tuple[int, ...] = ()
    """Heads that read the encoder; 0 for its own layers. Empty for a model with one stack of layers."""
    tokens: tuple[float, ...] = ()
    """Share of the tokens that remain after each layer. Empty for a model whose layers all see all of them."""
    merged: bool = False
    """Whether the other tokens have merged with them instead of being dropped."""
    first_stays: bool = False
    """Whether the first token never merges, since the head reads it alone."""
    prefix: int = 0
    """Learned keys and values of each attention."""
    embedding_rank: int = 0
    """Rank of the embeddings of tokens; 0 for a plain table."""

    def same(self, other: Sizes) -> bool:
        """Whether two shapes are equal, up to the rounding of `scaling`."""
        return (
            len(self.heads) == len(other.heads)
            and len(self.tokens) == len(other.tokens)
            and all(
                all(map(math.isclose, getattr(self, field.name), getattr(other, field.name)))
                if isinstance(getattr(self, field.name), tuple)
                else getattr(self, field.name) == getattr(other, field.name)
                for field in fields(self)
            )
        )

    def of_layers(self, layers: Sequence[int]) -> Sizes:
        """Returns the sizes of a model with only these layers."""

        def pick(values: Sequence[T]) -> tuple[T, ...]:
            return tuple(values[layer] for layer in layers)

        return Sizes(
            self.hidden,
            self.vocabulary,
            self.head_dim,
            pick(self.heads),
            pick(self.key_value_heads),
            pick(self.scaling),
            pick(self.ffn),
            pick(self.experts),
            pick(self.cross) if self.cross else (),
            pick(self.tokens) if self.tokens else (),
            merged=self.merged,
            first_stays=self.first_stays,
            prefix=self.prefix,
            embedding_rank=self.embedding_rank,
        )


@dataclass(frozen=True)
class Structure:
    """The meaning of the weight axes of a model."""

    stacks: tuple[Stack, ...]
    """The stacks of blocks: one, or an encoder's and a decoder's."""
    blocks: tuple[str, ...]
    """Module name of each block."""
    attentions: tuple[Attention, ...]
    """Attention of each block to its own tokens."""
    cross_attentions: Mapping[int, Attention]
    """Attention to the tokens of the encoder, by block of the decoder."""
    residual: frozenset[Axis]
    """Axes over the channels of the residual stream."""
    heads: tuple[HeadAxes, ...]
    """For each block: axes over the head dimensions of its attention to its own tokens."""
    cross: tuple[HeadAxes, ...]
    """The same for the attention to the encoder; empty for a block without."""
    ffn: tuple[frozenset[Axis], ...]
    """For each block: axes over FFN neurons."""
    experts: tuple[frozenset[Axis], ...]
    """For each block: axes over experts."""
    vocabulary: frozenset[Axis]
    """Axes over the vocabulary."""
    repeated: Mapping[Axis, int]
    """How many times an axis contains its size, side by side; 1 if absent."""
    tables: tuple[str, ...]
    """Weights of an encoder-decoder that have an entry for each head but belong to no layer, such as T5's table of relative positions."""
    sizes: Sizes
    """Sizes of the model."""

    @classmethod
    def of(cls, model: nn.Module, key: str, axes: Axes | None = None) -> Structure:
        """Finds the structure of a model.

        Args:
            model: A Transformers model with `nn.Linear` in place of `Conv1D`; its weights are not read and may be on the meta device.
            key: Key path in the recipe, for messages.
            axes: The model's axes if already known; they do not depend on its sizes.

        Raises:
            InputError: The model is not made of stacks of blocks, its attention layers cannot be identified, or weights and config do not
                match.
        """
        config: PreTrainedConfig = model.config
        stacks, blocks, found = stacks_of(model, key), tuple(blocks_of(model, key)), find_attentions(model, key)
        attentions = tuple(attention for _, attention in sorted(found.own.items()))
        heads = tuple(head_axes(model, attention) for attention in attentions)
        cross = tuple(head_axes(model, found.cross[number]) if number in found.cross else {} for number in range(len(blocks)))
        axes = axes or axes_of(model, key)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        inside = [f"{block}." for block in blocks]
        # axes are found by a model whose layers are all as large as the largest: experts that are modules may not be in this one
        there = [frozenset(axis for axis in every if axis[0] in shapes) for every in (axes.ffn, axes.experts, axes.hidden)]
        ffn, experts = (_by_block(every, inside) for every in there[:2])
        outside = sorted((there[0] | there[1]) - frozenset().union(*ffn, *experts))
        if outside:
            raise InputError(key, f"{outside[0][0]} of this {config.model_type} is outside its blocks, but follows the size of their FFNs")
        inner = {axis for block in (*heads, *cross) for axis in block}
        # Other axes follow the width without being its channels, such as the frequencies of rotary positions: they are not cut.
        width = sizes_config(config).hidden_size
        residual = frozenset(axis for axis in there[2] - inner if shapes[axis[0]][axis[1]] == width)
        ffn_sizes, expert_sizes = (_common_sizes(shapes, axes.repeated, every, config, key) for every in (ffn, experts))
        tables = _tables(Kind.of(model)) if len(stacks) > 1 else ()
        return cls(
            stacks,
            blocks,
            attentions,
            found.cross,
            residual,
            heads,
            cross,
            ffn,
            experts,
            axes.vocabulary,
            axes.repeated,
            tables,
            _sizes(config, attentions, found.cross, ffn_sizes, expert_sizes, key),
        )

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.attentions)

    def stack_of(self, name: str) -> int:
        """Returns the index of the stack that a module serves: the last one that holds it, else the first."""
        return max((number for number, stack in enumerate(self.stacks) if name.startswith(f"{stack.owner}.")), default=0)

    def of_heads(self, block: int, what: HeadKind) -> tuple[Attention, HeadAxes] | None:
        """Returns an attention of a block with the axes over its head dimensions; None if the block lacks it.

        Args:
            block: Number of the block.
            what: "heads", its attention to its own tokens, or "cross", that to the encoder.
        """
        if what == "heads":
            return self.attentions[block], self.heads[block]
        return (self.cross_attentions[block], self.cross[block]) if block in self.cross_attentions else None


def _common_sizes(
    shapes: Mapping[str, tuple[int, ...]],
    repeated: Mapping[Axis, int],
    blocks: Sequence[frozenset[Axis]],
    config: PreTrainedConfig,
    key: str,
) -> tuple[int, ...]:
    """Returns the size that all axes of a block have, block by block; 0 for a block without such axes.

    Raises:
        InputError: They differ.
    """
    sizes = []
    for found in blocks:
        lengths = {shapes[name][axis] / repeated.get((name, axis), 1) for name, axis in found}
        if len(lengths) > 1:
            raise InputError(key, f"{min(found)[0]} of this {config.model_type} does not have the size of the weights next to it")
        sizes.append(int(lengths.pop()) if lengths else 0)
    return tuple(sizes)


def _sizes(
    config: PreTrainedConfig,
    attentions: Sequence[Attention],
    cross: Mapping[int, Attention],
    ffn: tuple[int, ...],
    experts: tuple[int, ...],
    key: str,
) -> Sizes:
    """Returns the sizes of a model, given its attentions and the neurons and experts of each block.

    Raises:
        InputError: Its heads are not alike.
    """
    if any(attention.group > 1 or attention.scaling != attentions[number].scaling for number, attention in cross.items()):
        raise InputError(key, f"a {config.model_type} reads its encoder with heads unlike its own", "that is not supported")
    if len({attention.head_dim for attention in (*attentions, *cross.values())}) > 1:
        raise InputError(key, f"the heads of this {config.model_type} do not all have the same dimension")
    return Sizes(
        sizes_config(config).hidden_size,
        size_of(config, "vocabulary"),
        attentions[0].head_dim,
        tuple(attention.heads for attention in attentions),
        tuple(attention.key_value_heads for attention in attentions),
        tuple(attention.scaling for attention in attentions),
        ffn,
        experts,
        tuple(cross[number].heads if number in cross else 0 for number in range(len(attentions))) if cross else (),
        tokens=tokens_of(config),
        merged=merges(config),
        first_stays=first_stays(config),
        prefix=prefix_of(config),
        embedding_rank=embedding_rank_of(config),
    )


@functools.lru_cache(maxsize=64)
def _tables(kind: Kind) -> tuple[str, ...]:
    """Returns the weights outside layers that grow with the number of heads, by building the model with twice as many."""
    plain = copy.deepcopy(kind.config)
    if hasattr(plain, SHAPE_KEY):
        delattr(plain, SHAPE_KEY)
    changed = copy.deepcopy(plain)
    name = changed.attribute_map.get("num_attention_heads", "num_attention_heads")
    for one in (name, OF_DECODER.get(name, name)):
        setattr(changed, one, 2 * getattr(plain, one))
    try:
        model, others = kind.make(plain), kind.make(changed).state_dict()
    except REFUSED:  # a width that so many heads do not divide: it is shared between them, and no table follows their number
        return ()
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in others}
    return tuple(name for name, value in model.state_dict().items() if value.shape != others[name].shape and not is_layer(owners[name]))


def _by_block(axes: frozenset[Axis], inside: Sequence[str]) -> tuple[frozenset[Axis], ...]:
    return tuple(frozenset(axis for axis in axes if axis[0].startswith(start)) for start in inside)


def is_interleaved(attention: Attention, parts: Sequence[tuple[str, int]]) -> bool:
    """Whether an axis over head dimensions with these parts has query, key and value head by head."""
    return attention.interleaved and len(parts) > 1


def head_pieces(attention: Attention, parts: Sequence[tuple[str, int]]) -> list[int]:
    """Returns the lengths of the pieces of an axis over head dimensions, each of which has equally many dimensions for each head."""
    lengths = [attention.size(what) for what, _ in parts]
    return [sum(lengths)] if is_interleaved(attention, parts) else lengths


def head_indices(attention: Attention, axes: HeadAxes, numbers: Mapping[str, Tensor], shared: Sequence[int]) -> dict[Axis, Tensor]:
    """Returns the indices of some heads along each axis over the head dimensions of one attention, int64.

    Args:
        attention: The attention.
        axes: Its axes.
        numbers: Rows of the projections of `query`, `key` and `value`, int64.
        shared: The heads of keys and values that they belong to.
    """
    chosen = {}
    for axis, parts in axes.items():
        if is_interleaved(attention, parts):
            chosen[axis] = unit_indices(shared, (attention.group + 2) * attention.head_dim)
            continue
        starts, start = [], 0
        for what, _ in parts:
            starts.append(numbers[what] + start)
            start += attention.size(what)
        chosen[axis] = torch.cat(starts)
    return chosen


def unit_indices(units: Sequence[int], size: int) -> Tensor:
    """Returns the indices of units of `size` elements each, int64."""
    return (torch.tensor(units)[:, None] * size + torch.arange(size)).flatten()


def head_axes(model: nn.Module, attention: Attention) -> HeadAxes:
    """Returns the axes over the head dimensions of one attention."""
    found: dict[Axis, tuple[tuple[str, int], ...]] = {}
    for layer in {layer for layer, _ in attention.parts.values()}:
        parts = tuple(sorted(((what, place) for what, (name, place) in attention.parts.items() if name == layer), key=lambda part: part[1]))
        module = model.get_submodule(layer)
        found[f"{layer}.weight", out_axis(module)] = parts
        if module.bias is not None:
            found[f"{layer}.bias", 0] = parts
    found[f"{attention.output}.weight", 1 - out_axis(model.get_submodule(attention.output))] = (("query", 0),)
    for what, name in names_of(model, attention.module).items():
        found[name, 1] = ((what, 0),)
    return found
