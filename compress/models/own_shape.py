"""A shape of its own: what config.json says of a model whose sizes no stock config can express."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveFloat, PositiveInt, ValidationError

from compress.core.config import Config
from compress.core.errors import InputError

SHAPE_KEY = "compress_architecture"
"""Key of config.json where a model has a shape that a stock config cannot express; see `compress.models.shapes`."""


class OwnShape(Config):
    """What a config says of a shape of its own."""

    model_type: str
    """That of the stock class."""
    head_dim: PositiveInt
    """Numbers of a head."""
    heads: tuple[PositiveInt, ...]
    """Query heads of each layer."""
    key_value_heads: tuple[PositiveInt, ...]
    """Heads of keys and values of each layer."""
    scaling: tuple[PositiveFloat, ...]
    """Factor of the scores Q K^T in each layer."""
    ffn: tuple[PositiveInt, ...]
    """Neurons of the FFN of each layer, of each expert where there are several."""
    experts: tuple[PositiveInt, ...] = ()
    """Experts of each layer; absent where it has one FFN."""


def read_own(own: Any, depth: int, key: str) -> OwnShape:
    """Reads what a config says of a shape of its own.

    Args:
        own: What stands in the config.
        depth: Its number of layers.
        key: What the message is about.

    Raises:
        InputError: It is damaged.
    """
    try:
        shape = OwnShape.model_validate(own)
        lengths = {len(shape.heads), len(shape.key_value_heads), len(shape.scaling), len(shape.ffn), len(shape.experts) or depth}
        if lengths == {depth}:
            return shape
        problem = f"lists of {depth} entries, one a layer, are needed"
    except ValidationError as error:
        problem = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()[:3])
    raise InputError(f"{key}: {SHAPE_KEY} in config.json is damaged ({problem}); write the checkpoint again")


def stock_type(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json with the model type that Transformers knows: a shape of its own has another one written."""
    own = raw.get(SHAPE_KEY)
    return {**raw, "model_type": own.get("model_type")} if isinstance(own, dict) else raw
