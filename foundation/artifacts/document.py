"""Documents of a run, such as `report.json`: each is described by one model.

A field of a model has its type and, below it, its meaning. From these come the reading (attributes), the writing (`written`), the JSON
schema and the reference page. Keys of a document are only ever added:

    a key is absent    the field has its default, so that documents of every version can be read, and it is not written again
    a key is null      the same, where the type has no null; null entries of lists and maps are left out too
    a key is unknown   it is kept and written again: the document is of a later version
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema, model_validator

from foundation.artifacts.artifact import DamagedArtifact, read_json
from foundation.core.shown import reason

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
"""A number that keeps its type: 1 is written as 1, and not as 1.0."""
Figures = dict[str, Any]
"""Figures of a stage, which its docstring explains."""


class Document(BaseModel):
    """A map of a document."""

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        use_attribute_docstrings=True,
        populate_by_name=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        rules = _rules(cls)
        entries = {key: rules[key].cleaned(entry) if key in rules else entry for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None or key not in rules or rules[key].nullable}

    def written(self) -> dict[str, Any]:
        """Returns the document as it is written: plain data, with the keys that were set, in the order of the fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def with_(self, **more: object) -> Self:
        """Returns the document with other values of some fields."""
        return self.model_copy(update=more)


class OfVariant(Document):
    """First key of an entry that is not listed by variant."""

    variant: str = ""
    """Id of the variant."""


D = TypeVar("D", bound=Document)


def read(model: type[D], file: Path) -> D:
    """Returns the document of a file.

    Raises:
        DamagedArtifact: The file is missing, or is no such document.
    """
    try:
        return model.model_validate(read_json(file))
    except ValidationError as error:
        raise DamagedArtifact(f"{file}", f"damaged ({reason(error)})") from error


class _Rule(NamedTuple):
    """Where a value may have nulls."""

    nullable: bool
    items: bool
    """Whether entries of the list, or values of the map, may be null."""

    def cleaned(self, value: object) -> object:
        if self.items:
            return value
        if isinstance(value, list | tuple):
            return [item for item in value if item is not None]
        return {key: item for key, item in value.items() if item is not None} if type(value) is dict else value


@cache
def _rules(model: type[Document]) -> dict[str, _Rule]:
    """Returns the rule of each key."""
    rules = {}
    for name, field in model.model_fields.items():
        kind = bare(field.annotation)
        arguments = get_args(kind)
        item = arguments[-1] if get_origin(kind) is dict else arguments[0] if arguments and get_origin(kind) is tuple else Any
        rules[field.alias or name] = _Rule(_is_nullable(field.annotation), _is_nullable(item) or item is Any)
    return rules


def _is_nullable(kind: object) -> bool:
    return NoneType in get_args(_unwrapped(kind))


def _unwrapped(kind: object) -> object:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def bare(kind: object) -> object:
    """Returns a type without what is annotated, and without null."""
    kind = _unwrapped(kind)
    if get_origin(kind) not in (Union, UnionType):
        return kind
    members = [member for member in get_args(kind) if member is not NoneType]
    return float if set(members) == {int, float} else bare(members[0])
