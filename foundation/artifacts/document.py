"""Documents of a run, such as `report.json`: each is described by one model.

A field of a model has its type and, below it, its meaning. From these come the reading (attributes), the writing (`written`), the JSON
schema and the rows of the reference page (`sections`). Keys of a document are only ever added:

    a key is absent    the field has its default, so that documents of every version can be read, and it is not written again
    a key is null      the same, where the type has no null; null entries of lists and maps are left out likewise
    a key is unknown   it is kept and written again: the document is of a later version
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
Name = Annotated[str, "NAME"]
TYPES = {str: "text", bool: "boolean", int: "integer", float: "number", Any: "any"}


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
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        rules = _rules(cls)
        entries = {key: rules[key].cleaned(entry) if key in rules else entry for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None or key not in rules or rules[key].nullable}

    def written(self) -> dict[str, Any]:
        """Returns the document as it is written: plain data, with the keys that were set, in the order of the fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def with_(self, **more: Any) -> Self:
        """Returns the document with other values of some fields."""
        return self.model_copy(update=more)


D = TypeVar("D", bound=Document)


def read(model: type[D], file: Path) -> D:
    """Returns the document of a file.

    Raises:
        DamagedArtifact: The file is missing, or is no such document.
    """
    try:
        return model.model_validate(read_json(file))
    except ValidationError as error:
        raise DamagedArtifact(f"{file}: damaged ({reason(error)})") from error


class _Rule(NamedTuple):
    """Where a value may have nulls."""

    nullable: bool
    items: bool
    """Whether entries of the list, or values of the map, may be null."""

    def cleaned(self, value: Any) -> Any:
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
        kind = _bare(field.annotation)
        arguments = get_args(kind)
        item = arguments[-1] if get_origin(kind) is dict else arguments[0] if arguments and get_origin(kind) is tuple else Any
        rules[field.alias or name] = _Rule(_is_nullable(field.annotation), _is_nullable(item) or item is Any)
    return rules


def _is_nullable(kind: Any) -> bool:
    return NoneType in get_args(_unwrapped(kind))


def _unwrapped(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _bare(kind: Any) -> Any:
    """Returns a type without what is annotated, and without null."""
    kind = _unwrapped(kind)
    if get_origin(kind) not in (Union, UnionType):
        return kind
    members = [member for member in get_args(kind) if member is not NoneType]
    return float if set(members) == {int, float} else _bare(members[0])


class Key(NamedTuple):
    """One key of a map, as the reference shows it."""

    name: str
    type: str
    meaning: str


class Section(NamedTuple):
    """The keys of one map."""

    path: str
    """`[]` stands for the entries of a list, a word in capitals for a name that varies."""
    keys: tuple[Key, ...]


def sections(model: type[Document]) -> list[Section]:
    """Returns every map of a document, each once, at the first place where it stands."""
    return list(_sections(model, "", {}))


def _sections(model: type[Document], path: str, seen: dict[type[Document], str]) -> Iterator[Section]:
    seen[model] = path
    keys, below = [], []
    for name, field in model.model_fields.items():
        ending, kind = _place(field.annotation)
        place, meaning = f"{field.alias or name}{ending}", " ".join((field.description or "").split())
        whole = f"{path}.{place}" if path else place
        if isinstance(kind, type) and issubclass(kind, Document):
            if kind in seen:
                meaning += f" Same keys as `{seen[kind]}`."
            else:
                seen[kind] = whole
                below.append((kind, whole))
        keys.append(Key(place, TYPES.get(kind, "map"), meaning))
    yield Section(path, tuple(keys))
    for kind, whole in below:
        yield from _sections(kind, whole, seen)


def _place(annotation: Any) -> tuple[str, Any]:
    """Returns what follows a key down to its values, and their type."""
    kind = _bare(annotation)
    if kind == Figures:
        return "", kind
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        ending, inner = _place(arguments[0])
        return f"[]{ending}", inner
    if get_origin(kind) is dict:
        ending, inner = _place(arguments[1])
        name = get_args(arguments[0])[1] if get_origin(arguments[0]) is Annotated else "NAME"
        return f".{name}{ending}", inner
    return "", kind


def unknown(document: Document, path: str = "") -> Iterator[str]:
    """Yields the keys of a document that its model does not have."""
    yield from (f"{path}{key}" for key in document.model_extra or ())
    for name, field in type(document).model_fields.items():
        yield from _unknown(getattr(document, name), f"{path}{field.alias or name}")


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Document):
        yield from unknown(value, f"{path}.")
    elif isinstance(value, tuple):
        for item in value:
            yield from _unknown(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unknown(item, f"{path}.{key}")
