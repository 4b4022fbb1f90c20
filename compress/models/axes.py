"""Which axes of which weights follow a size of a Transformer: its width, its FFN, its vocabulary, its experts.

Nothing is found by the name of a weight. A model is made twice on the meta device, the second time with one size of its config changed; the
axes that differ are those of that size. Equal numbers (a vocabulary of as many entries as channels) are not mixed up. The sizes
themselves have names that configs do not agree on; `SIZES` lists them.

Weights that hold an FFN twice along one axis (gate and up of the experts of a MoE) grow by twice as much; the factor is kept.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from compress.core.errors import InputError
from compress.models.blocks import Kind
from compress.models.library import REFUSED, one_line
from compress.models.own_shape import SHAPE_KEY

Size = Literal["hidden", "ffn", "vocabulary", "experts"]
SIZES: Mapping[Size, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "hidden_dim", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""Under these names configs keep their sizes; the first one that a config has is meant: of a MoE the FFN of an expert."""

Axis = tuple[str, int]
"""Name of a weight, and the number of one of its axes."""


@dataclass(frozen=True)
class Axes:
    """Axes by what they follow."""

    hidden: frozenset[Axis]
    """The width; where heads divide it, the axes over the numbers of all heads are among them."""
    ffn: frozenset[Axis]
    vocabulary: frozenset[Axis]
    experts: frozenset[Axis]
    repeated: Mapping[Axis, int]
    """How many times an axis holds its size, side by side; 1 where absent."""


def key_of(config: Any, size: Size) -> str | None:
    """Returns the name under which a config keeps a size; None where it has none."""
    return next((name for name in SIZES[size] if hasattr(config, name)), None)


def size_of(config: Any, size: Size) -> int:
    """Returns a size that a config has; 0 where it has none."""
    name = key_of(config, size)
    if name is None:
        return 0
    value = getattr(config, name)
    return int(4 * config.hidden_size if value is None and size == "ffn" else value)  # GPT-2: absent means four times the width


def axes_of(model: nn.Module, key: str) -> Axes:
    """Returns the axes that follow each size.

    Args:
        model: A Transformers model, its `Conv1D` as linear layers; may lie on the meta device.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: No model of another size can be made.
    """
    return _axes(Kind.of(model), key)


@functools.lru_cache(maxsize=64)
def _axes(kind: Kind, key: str) -> Axes:
    plain = copy.deepcopy(kind.config)
    if hasattr(plain, SHAPE_KEY):
        delattr(plain, SHAPE_KEY)
    ffn = key_of(plain, "ffn")
    if ffn is not None:
        setattr(plain, ffn, size_of(plain, "ffn"))  # so that it does not follow the width
    shapes = _shapes(kind, plain, key)
    found: dict[Size, frozenset[Axis]] = {}
    repeated: dict[Axis, int] = {}
    for size in SIZES:
        name, old = key_of(plain, size), size_of(plain, size)
        if name is None or not old:
            found[size] = frozenset()
            continue
        changed, added = copy.deepcopy(plain), old if size == "hidden" else 1  # twice the width: heads have to divide it
        setattr(changed, name, old + added)
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


def _shapes(kind: Kind, config: Any, key: str) -> dict[str, torch.Size]:
    try:
        return {name: value.shape for name, value in kind.make(config).state_dict().items()}
    except REFUSED as error:
        raise InputError(f"{key}: a {config.model_type} of another size cannot be made ({one_line(error)})") from error
