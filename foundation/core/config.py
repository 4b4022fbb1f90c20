"""Base class of every typed config: the recipe, its sections and its stages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler


class Config(BaseModel):
    """Base class of every part of a recipe: frozen; unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True)


def as_given(config: Config, whole: SerializerFunctionWrapHandler, later: Collection[str]) -> dict[str, Any]:
    """Returns the dump of a config without the keys that came later and have their defaults: recipes without them keep their cache keys.

    Args:
        config: The config.
        whole: Dumps all of it; what a `model_serializer(mode="wrap")` is given.
        later: Names of these keys.
    """
    fields = type(config).model_fields
    return {key: value for key, value in whole(config).items() if key not in later or getattr(config, key) != fields[key].default}
