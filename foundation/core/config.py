"""Base class of every typed config: the recipe, its sections and its stages."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Config(BaseModel):
    """Base class of every part of a recipe: frozen; unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True, defer_build=True
    )

    LATER: ClassVar[tuple[str, ...]] = ()
    """Keys that later releases added. A dump leaves them out while they have their defaults, so that recipes without them keep their cache
    keys."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, whole: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields = type(self).model_fields
        return {key: value for key, value in whole(self).items() if key not in self.LATER or getattr(self, key) != fields[key].default}
