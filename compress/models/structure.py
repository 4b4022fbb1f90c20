"""The structure of a Transformer: its blocks, what runs along every axis of every weight, and the sizes of each layer.

    residual   channels of the residual stream: one choice for the whole model
    heads      numbers of the heads of one block; queries of one group share keys and values
    ffn        neurons of the FFN of one block
    experts    experts of one block of a MoE
    vocabulary rows of the embedding, and of the head of a language model

This is what surgery works on (`prune.surgery`, `distill.width`), and what `compress.models.shapes` writes into a config. All of it is found
by structure, on the meta device (`compress.models.attention`, `compress.models.axes`).
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

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """The shape of a model: what surgery changes. Tuples have one entry a layer."""

    hidden: int
    """Channels of the residual stream."""
    vocabulary: int
    """Rows of the embedding; 0 for images."""
    head_dim: int
    """Numbers of a head."""
    heads: tuple[int, ...]
    """Query heads."""
    key_value_heads: tuple[int, ...]
    """Heads of keys and values."""
    scaling: tuple[float, ...]
    """Factor of the scores Q K^T."""
    ffn: tuple[int, ...]
    """Neurons of the FFN, of each expert where there are several."""
    experts: tuple[int, ...]
    """Experts; 0 for a layer with one FFN."""

    def same(self, other: Sizes) -> bool:
        """Whether two shapes are one."""
        return len(self.heads) == len(other.heads) and all(
            all(map(math.isclose, getattr(self, field.name), getattr(other, field.name)))
            if isinstance(getattr(self, field.name), tuple)
            else getattr(self, field.name) == getattr(other, field.name)
            for field in fields(self)
        )

    def of_layers(self, layers: Sequence[int]) -> Sizes:
        """Returns the sizes of a model of some of the layers."""

        def some(values: Sequence[T]) -> tuple[T, ...]:
            return tuple(values[layer] for layer in layers)

        return Sizes(
            self.hidden,
            self.vocabulary,
            self.head_dim,
            some(self.heads),
            some(self.key_value_heads),
            some(self.scaling),
            some(self.ffn),
            some(self.experts),
        )


@dataclass(frozen=True)
class Structure:
    """What runs along the axes of the weights of a model."""

    prefix: str
    """Name of the list of blocks."""
    attentions: tuple[Attention, ...]
    """By block."""
    residual: frozenset[Axis]
    """Axes over the channels of the residual stream."""
    heads: tuple[Mapping[Axis, tuple[tuple[str, int], ...]], ...]
    """By block: axes over the numbers of heads, with the parts that lie along it (query, key or value, and its place)."""
    ffn: tuple[frozenset[Axis], ...]
    """By block."""
    experts: tuple[frozenset[Axis], ...]
    """By block."""
    vocabulary: frozenset[Axis]
    repeated: Mapping[Axis, int]
    """How many times an axis holds its size, side by side; 1 where absent."""
    sizes: Sizes

    @classmethod
    def of(cls, model: nn.Module, key: str, axes: Axes | None = None) -> Structure:
        """Finds the structure of a model.

        Args:
            model: A Transformers model, its `Conv1D` as linear layers; its weights are not looked at, and may lie on the meta device.
            key: Key path in the recipe, for messages.
            axes: Its axes, where they are known already: they do not depend on its sizes.

        Raises:
            InputError: It is no stack of blocks whose attention can be told, or its weights do not have the sizes of its config.
        """
        config: Any = model.config
        prefix, blocks = repeated_blocks(model, key)
        attentions = tuple(attention for _, attention in sorted(find_attentions(model, key).items()))
        heads = tuple(head_axes(model, attention) for attention in attentions)
        axes = axes or axes_of(model, key)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        inside = [f"{prefix}.{number}." for number in range(len(blocks))]
        ffn, experts = (_by_block(found, inside) for found in (axes.ffn, axes.experts))
        residual = axes.hidden - {axis for block in heads for axis in block}

        def size(found: frozenset[Axis]) -> int:
            lengths = {shapes[name][axis] / axes.repeated.get((name, axis), 1) for name, axis in found}
            if len(lengths) > 1:
                raise InputError(f"{key}: {min(found)[0]} of this {config.model_type} is of another size than the weights beside it")
            return int(lengths.pop()) if lengths else 0

        if len({attention.head_dim for attention in attentions}) > 1:
            raise InputError(f"{key}: the heads of this {config.model_type} are not all of one size")
        odd = [name for name, axis in residual if shapes[name][axis] != config.hidden_size]
        if odd:
            raise InputError(f"{key}: {min(odd)} of this {config.model_type} is not as wide as its config says")
        sizes = Sizes(
            config.hidden_size,
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


def _by_block(axes: frozenset[Axis], inside: Sequence[str]) -> tuple[frozenset[Axis], ...]:
    return tuple(frozenset(axis for axis in axes if axis[0].startswith(start)) for start in inside)


def head_axes(model: nn.Module, attention: Attention) -> dict[Axis, tuple[tuple[str, int], ...]]:
    """Returns the axes over the numbers of the heads of one block, with what lies along each: query, key or value, and its place."""
    found: dict[Axis, tuple[tuple[str, int], ...]] = {}
    for layer in {layer for layer, _ in attention.parts.values()}:
        parts = tuple(sorted(((what, place) for what, (name, place) in attention.parts.items() if name == layer), key=lambda part: part[1]))
        module = model.get_submodule(layer)
        found[f"{layer}.weight", out_axis(module)] = parts
        if module.bias is not None:
            found[f"{layer}.bias", 0] = parts
    found[f"{attention.output}.weight", 1 - out_axis(model.get_submodule(attention.output))] = (("query", 0),)
    return found
