"""Finds which weight axes depend on a size of a Transformer: its width, FFN, vocabulary or number of experts.

Weights are not looked up by name. A model is built twice on the meta device, the second time with one size of its config changed; the axes
that differ belong to that size. Sizes that happen to be equal (a vocabulary as large as the width) are therefore not confused. The config
keys of the sizes differ between model families; `SIZES` lists them.

A weight that contains an FFN twice along one axis (gate and up projection of MoE experts) grows twice as much; `repeated` has the factor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import Kind
from foundation.models.layers.low_rank_embedding import PROJECTION, TABLE, low_rank_tables
from foundation.models.library import REFUSED, one_line, sizes_config
from foundation.models.own_shape import SHAPE_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Size = Literal["hidden", "ffn", "vocabulary", "experts"]
SIZES: Mapping[Size, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""Config keys of each size; the first one that a config has counts. For a MoE, `ffn` is the FFN of one expert."""
OF_DECODER = {
    "encoder_ffn_dim": "decoder_ffn_dim",
    "vocab_size": "decoder_vocab_size",
    "encoder_attention_heads": "decoder_attention_heads",
}
"""Config keys of an encoder-decoder that hold the size of its decoder, by the key that holds the size of the encoder."""

Axis = tuple[str, int]
"""Name of a weight, and the index of one of its axes."""


@dataclass(frozen=True)
class Axes:
    """Axes, grouped by the size they depend on."""

    hidden: frozenset[Axis]
    """The width; includes the axes over all heads if the head dimension is derived from the width."""
    ffn: frozenset[Axis]
    vocabulary: frozenset[Axis]
    experts: frozenset[Axis]
    repeated: Mapping[Axis, int]
    """Number of times that an axis contains its size; 1 if absent."""


def key_of(config: PreTrainedConfig, size: Size) -> str | None:
    """Returns the config key of a size, or None if the config has none."""
    return next((name for name in SIZES[size] if hasattr(sizes_config(config), name)), None)


def keys_of(config: PreTrainedConfig, size: Size) -> tuple[str, ...]:
    """Returns the config keys of a size: the key of `key_of`, and the decoder's where it has one of its own."""
    name = key_of(config, size)
    if name is None:
        return ()
    apart = size == "vocabulary" and not getattr(config, "share_encoder_decoder_embeddings", True)  # Marian: other tokens on either side
    of_decoder = None if apart else OF_DECODER.get(name)
    return (name, of_decoder) if of_decoder is not None and hasattr(sizes_config(config), of_decoder) else (name,)


def size_of(config: PreTrainedConfig, size: Size) -> int:
    """Returns the value of a size in a config, or 0 if the config has none."""
    name = key_of(config, size)
    if name is None:
        return 0
    own = sizes_config(config)
    value = getattr(own, name)
    return int(4 * own.hidden_size if value is None and size == "ffn" else value)  # GPT-2: None means four times the width


def axes_of(model: nn.Module, key: str) -> Axes:
    """Returns the axes that depend on each size.

    Args:
        model: A Transformers model with `nn.Linear` in place of `Conv1D`; may be on the meta device.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: A model with another size cannot be built.
    """
    return _in_low_rank(_axes(Kind.of(model), key), model)


def _in_low_rank(axes: Axes, model: nn.Module) -> Axes:
    """Returns the axes of a model from the axes that a plain table of tokens would have: its embeddings may be a narrow table, which has
    the tokens, and a projection, which has the channels."""
    tables = [f"{name}." for name in low_rank_tables(model)]
    if not tables:
        return axes
    (name,) = tables

    def moved(found: frozenset[Axis]) -> frozenset[Axis]:
        places = {(f"{name}weight", 0): (f"{name}{TABLE}.weight", 0), (f"{name}weight", 1): (f"{name}{PROJECTION}.weight", 0)}
        return frozenset(places.get(axis, axis) for axis in found)

    return replace(axes, hidden=moved(axes.hidden), vocabulary=moved(axes.vocabulary))


@functools.lru_cache(maxsize=64)
def _axes(kind: Kind, key: str) -> Axes:
    plain = copy.deepcopy(kind.config)
    if hasattr(plain, SHAPE_KEY):
        delattr(plain, SHAPE_KEY)
    ffn = keys_of(plain, "ffn")
    if len(ffn) == 1:
        setattr(sizes_config(plain), ffn[0], size_of(plain, "ffn"))  # set explicitly, or it would change with the width
    shapes = _shapes(kind, plain, key)
    found: dict[Size, frozenset[Axis]] = {}
    repeated: dict[Axis, int] = {}
    for size in SIZES:
        names, old = keys_of(plain, size), size_of(plain, size)
        if not names or not old:
            found[size] = frozenset()
            continue
        changed, added = copy.deepcopy(plain), old if size == "hidden" else 1  # double the width, which heads still divide
        for name in names:
            setattr(sizes_config(changed), name, getattr(sizes_config(plain), name) + added)
        others = _shapes(kind, changed, key)
        grown = {
            (weight, axis): others[weight][axis] - length
            for weight, shape in shapes.items()
            for axis, length in enumerate(shape)
            if others[weight][axis] != length
        }
        found[size] = frozenset(grown)
        if size != "hidden":
            repeated |= {axis: growth for axis, growth in grown.items() if growth > 1}
    return Axes(found["hidden"], found["ffn"], found["vocabulary"], found["experts"], repeated)


def _shapes(kind: Kind, config: PreTrainedConfig, key: str) -> dict[str, torch.Size]:
    try:
        return {name: value.shape for name, value in kind.make(config).state_dict().items()}
    except REFUSED as error:
        raise InputError(key, f"a {config.model_type} of another size cannot be built ({one_line(error)})") from error
