"""Maps the layers, channels and heads of a pruned model to the layers, channels and heads of the original, so that distillation can pair
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from foundation.models.library import depths_of
from foundation.models.own_shape import SHAPE_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Origin:
    """For each layer, channel and head of a model: its index in the original model, from 0."""

    layers: tuple[int, ...]
    hidden: tuple[int, ...]
    """Channels of the residual stream."""
    heads: tuple[tuple[int, ...] | None, ...]
    """Query heads of each layer; None if the layer still has all of them."""

    @classmethod
    def whole(cls, depth: int, width: int) -> Self:
        """Returns the origin of an unpruned model.

        Args:
            depth: Number of layers.
            width: Number of channels.
        """
        return cls(tuple(range(depth)), tuple(range(width)), (None,) * depth)

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> Self | None:
        """Returns the origin of an unpruned model with this config; None if layers differ in width and number of heads (ConvNeXt, Swin)."""
        return None if _shape(config) is None else cls.whole(sum(depths_of(config) or ()), config.hidden_size)

    def after(self, layers: Sequence[int], hidden: Sequence[int], heads: Sequence[Sequence[int] | None]) -> Self:
        """Returns the origin after pruning a model of this origin.

        Args:
            layers: Layers to keep.
            hidden: Channels to keep.
            heads: For each kept layer, the heads to keep; None keeps all.
        """
        before = [self.heads[layer] for layer in layers]
        composed = [
            theirs if ours is None else tuple(ours) if theirs is None else tuple(theirs[head] for head in ours)
            for ours, theirs in zip(heads, before, strict=True)
        ]
        kept = (tuple(self.layers[layer] for layer in layers), tuple(self.hidden[channel] for channel in hidden))
        return type(self)(*kept, tuple(composed))


def same_shape(config: PreTrainedConfig, other: PreTrainedConfig) -> bool:
    """Whether two models have the same layers, channels and heads, so that each part of one has a counterpart in the other.

    Always False for models whose config has no such numbers (ConvNeXt) or different ones per stage (Swin).
    """
    found = _shape(config)
    return found is not None and found == _shape(other)


def _shape(config: PreTrainedConfig) -> tuple[Any, ...] | None:
    own, depths = getattr(config, SHAPE_KEY, None), depths_of(config)
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    if depths is None or not isinstance(getattr(config, "num_hidden_layers", None), int):
        return None
    if not (isinstance(width, int) and isinstance(heads, int)):
        return None
    of_decoder = getattr(config, "decoder_attention_heads", heads)
    stock = (heads,) * depths[0] + (of_decoder,) * sum(depths[1:])
    return config.model_type, depths, width, tuple(own["heads"]) if own else stock
