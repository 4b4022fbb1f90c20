"""The entry in config.json for models whose sizes a stock config cannot express, such as different heads per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from foundation.core.config import Config
from foundation.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHAPE_KEY = "compress_architecture"
"""Key of that entry in config.json; see `foundation.models.architecture.shapes`."""


Share = Annotated[float, Field(gt=0, le=1)]


class OwnShape(Config):
    """The sizes of a model, layer by layer; the layers of an encoder-decoder's encoder come before its decoder's."""

    model_type: str
    """Model type of the stock class."""
    head_dim: PositiveInt
    """Dimension of a head."""
    heads: tuple[PositiveInt, ...]
    """Query heads of each layer."""
    key_value_heads: tuple[PositiveInt, ...]
    """Key and value heads of each layer."""
    scaling: tuple[PositiveFloat, ...]
    """Factor of the scores Q K^T in each layer."""
    ffn: tuple[PositiveInt, ...] = ()
    """FFN neurons of each layer, per expert if there are several; absent for models whose config does not name them."""
    experts: tuple[NonNegativeInt, ...] = ()
    """Experts of each layer, 0 for a layer with one FFN; absent for models without experts."""
    cross: tuple[NonNegativeInt, ...] = ()
    """Heads of each layer that read the encoder, 0 in the encoder itself; absent for models with one stack of layers."""
    tokens: tuple[Share, ...] = ()
    """Share of the tokens that remain after each layer (`foundation.models.architecture.dropped_tokens`); absent where all of them do."""
    merged: bool = False
    """Whether the others have merged with them (`foundation.models.architecture.merged_tokens`) instead of being dropped."""
    first_stays: bool = False
    """Whether the first token never merges, since the head reads it alone."""
    prefix: NonNegativeInt = 0
    """Number of learned keys and values that every attention reads before its own (`foundation.models.layers.prefix`)."""
    embedding_rank: NonNegativeInt = 0
    """Rank of the embeddings of tokens (`foundation.models.layers.low_rank_embedding`); 0 for a plain table."""


def read_own(own: Any, depth: int, key: str) -> OwnShape:
    """Validates the entry of a config.

    Args:
        own: Value of `SHAPE_KEY` in the config.
        depth: The config's number of layers, of all stacks together.
        key: Start of the error message.

    Raises:
        InputError: The entry is damaged.
    """
    try:
        shape = OwnShape.model_validate(own)
        optional = (shape.ffn, shape.experts, shape.cross, shape.tokens)
        lengths = {len(shape.heads), len(shape.key_value_heads), len(shape.scaling), *(len(values) or depth for values in optional)}
        if lengths == {depth}:
            return shape
        problem = f"lists of {depth} entries, one per layer, are needed"
    except ValidationError as error:
        problem = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()[:3])
    raise InputError(key, f"{SHAPE_KEY} in config.json is damaged ({problem})", remedy="write the checkpoint again")


def tokens_of(config: PreTrainedConfig) -> tuple[float, ...]:
    """Returns the share of the tokens that remain after each layer of the model of a Transformers config; empty where all of them do."""
    return tuple(_entries(config).get("tokens", ()))


def merges(config: PreTrainedConfig) -> bool:
    """Whether tokens merge in the model of a Transformers config, instead of being dropped."""
    return bool(_entries(config).get("merged", False))


def first_stays(config: PreTrainedConfig) -> bool:
    """Whether the first token of the model of a Transformers config never merges."""
    return bool(_entries(config).get("first_stays", False))


def prefix_of(config: PreTrainedConfig) -> int:
    """Returns the number of learned keys and values of each attention of the model of a Transformers config; 0 for none."""
    return int(_entries(config).get("prefix", 0))


def embedding_rank_of(config: PreTrainedConfig) -> int:
    """Returns the rank of the embeddings of tokens of the model of a Transformers config; 0 for a plain table."""
    return int(_entries(config).get("embedding_rank", 0))


def _entries(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the own shape of the model of a Transformers config as config.json holds it; empty for a stock shape."""
    return getattr(config, SHAPE_KEY, None) or {}


def stock_type(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json with the stock model type, which `foundation.models.architecture.shapes.mark` replaces in the
    file."""
    own = raw.get(SHAPE_KEY)
    return {**raw, "model_type": own.get("model_type")} if isinstance(own, dict) else raw
