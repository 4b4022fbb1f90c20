"""The structure of a Transformer: its blocks, the meaning of every weight axis, and the sizes of each layer.

    residual   channels of the residual stream, shared by the whole model
    heads      head dimensions of one block; the queries of a group share keys and values
    ffn        FFN neurons of one block
    experts    experts of one MoE block
    vocabulary rows of the embedding, and of a language model's head

Model surgery works on this structure (`prune.surgery`, `distill.width`), and `compress.models.shapes` writes it into a config. It is found
on the meta device, without relying on names of models or weights (`compress.models.attention`, `compress.models.axes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import nn

from compress.core.errors import InputError
from compress.models.attention import Attention, find_attentions, out_axis
from compress.models.axes import Axes, Axis, axes_of, size_of
from compress.models.blocks import repeated_blocks
from compress.models.library import sizes_config

T = TypeVar("T")


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

    def same(self, other: Sizes) -> bool:
        """Whether two shapes are equal, up to the rounding of `scaling`."""
        return len(self.heads) == len(other.heads) and all(
            all(map(math.isclose, getattr(self, field.name), getattr(other, field.name)))
            if isinstance(getattr(self, field.name), tuple)
            else getattr(self, field.name) == getattr(other, field.name)
            for field in fields(self)
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
        )


@dataclass(frozen=True)
class Structure:
    """The meaning of the weight axes of a model."""

    prefix: str
    """Module name of the list of blocks."""
    attentions: tuple[Attention, ...]
    """Attention of each block."""
    residual: frozenset[Axis]
    """Axes over the channels of the residual stream."""
    heads: tuple[Mapping[Axis, tuple[tuple[str, int], ...]], ...]
    """For each block: axes over head dimensions, with the parts along each (query, key or value, and its position)."""
    ffn: tuple[frozenset[Axis], ...]
    """For each block: axes over FFN neurons."""
    experts: tuple[frozenset[Axis], ...]
    """For each block: axes over experts."""
    vocabulary: frozenset[Axis]
    """Axes over the vocabulary."""
    repeated: Mapping[Axis, int]
    """How many times an axis contains its size, side by side; 1 if absent."""
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
            InputError: The model is not a stack of blocks, its attention layers cannot be identified, or weights and config do not match.
        """
        config: Any = model.config
        own = sizes_config(config)
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(f"{key}: a {config.model_type} has two stacks of blocks, an encoder and a decoder; a model with one is needed")
        prefix, blocks = repeated_blocks(model, key)
        attentions = tuple(attention for _, attention in sorted(find_attentions(model, key).items()))
        heads = tuple(head_axes(model, attention) for attention in attentions)
        axes = axes or axes_of(model, key)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        inside = [f"{prefix}.{number}." for number in range(len(blocks))]
        ffn, experts = (_by_block(found, inside) for found in (axes.ffn, axes.experts))
        outside = sorted({*axes.ffn, *axes.experts} - frozenset().union(*ffn, *experts))
        if outside:
            raise InputError(
                f"{key}: {outside[0][0]} of this {config.model_type} is outside its blocks, but follows the size of their FFNs"
            )
        inner = {axis for block in heads for axis in block}
        # Other axes follow the width without being its channels, such as the frequencies of rotary positions: they are not cut.
        residual = frozenset(axis for axis in axes.hidden - inner if shapes[axis[0]][axis[1]] == own.hidden_size)

        def size(found: frozenset[Axis]) -> int:
            lengths = {shapes[name][axis] / axes.repeated.get((name, axis), 1) for name, axis in found}
            if len(lengths) > 1:
                raise InputError(f"{key}: {min(found)[0]} of this {config.model_type} does not have the size of the weights next to it")
            return int(lengths.pop()) if lengths else 0

        if len({attention.head_dim for attention in attentions}) > 1:
            raise InputError(f"{key}: the heads of this {config.model_type} do not all have the same dimension")
        sizes = Sizes(
            own.hidden_size,
            size_of(config, "vocabulary"),
            attentions[0].head_dim,
            tuple(attention.heads for attention in attentions),
            tuple(attention.key_value_heads for attention in attentions),
            tuple(attention.scaling for attention in attentions),
            tuple(size(block) for block in ffn),
            tuple(size(block) for block in experts),
        )
        return cls(prefix, attentions, residual, heads, ffn, experts, axes.vocabulary, axes.repeated, sizes)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.attentions)

    def is_interleaved(self, block: int, axis: Axis) -> bool:
        """Whether an axis over head dimensions has query, key and value head by head."""
        return self.attentions[block].interleaved and len(self.heads[block][axis]) > 1

    def head_pieces(self, block: int, axis: Axis) -> list[int]:
        """Returns the lengths of the pieces of an axis over head dimensions, each of which has equally many dimensions for each head."""
        lengths = [self.attentions[block].size(what) for what, _ in self.heads[block][axis]]
        return [sum(lengths)] if self.is_interleaved(block, axis) else lengths


def _by_block(axes: frozenset[Axis], inside: Sequence[str]) -> tuple[frozenset[Axis], ...]:
    return tuple(frozenset(axis for axis in axes if axis[0].startswith(start)) for start in inside)


def head_axes(model: nn.Module, attention: Attention) -> dict[Axis, tuple[tuple[str, int], ...]]:
    """Returns the axes over the head dimensions of one block, with the parts along each: query, key or value, and its position."""
    found: dict[Axis, tuple[tuple[str, int], ...]] = {}
    for layer in {layer for layer, _ in attention.parts.values()}:
        parts = tuple(sorted(((what, place) for what, (name, place) in attention.parts.items() if name == layer), key=lambda part: part[1]))
        module = model.get_submodule(layer)
        found[f"{layer}.weight", out_axis(module)] = parts
        if module.bias is not None:
            found[f"{layer}.bias", 0] = parts
    found[f"{attention.output}.weight", 1 - out_axis(model.get_submodule(attention.output))] = (("query", 0),)
    return found
