"""`compress list`: everything that a recipe can name, from the config classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compress.commands.recipes import about, shipped
from compress.recipe import STAGES, schema
from foundation.core.engines import ENGINES
from foundation.core.errors import InputError, nearest
from foundation.core.named import Named
from foundation.labels.tasks import TASKS
from foundation.measure.judged import judgeable


def schema_text() -> str:
    """Returns the JSON schema of a recipe as text."""
    return json.dumps(schema(), indent=1)


def catalogue(what: str) -> str:
    """Returns the lines of `compress list WHAT`.

    Raises:
        InputError: The list is unknown.
    """
    lists = {"stages": _stages, "methods": _methods, "engines": _engines, "tasks": _tasks, "recipes": _recipes}
    if what not in lists:
        raise InputError(f"list {what}", "unknown", f"allowed: {', '.join(lists)}{nearest(what, lists)}")
    return "\n".join(lists[what]())


def _stages() -> Iterator[str]:
    for stage in STAGES:
        yield f"{stage.NAME:<14}{_first_line(stage)}"


def _methods() -> Iterator[str]:
    for stage in STAGES:
        allowed: dict[str, dict[object, None]] = {}  # the members of a union share keys
        for name, values in _choices(stage):
            allowed.setdefault(name, {}).update(dict.fromkeys(values))
        for name, named in allowed.items():
            yield f"{stage.NAME}.{name}: {', '.join(map(str, named))}"


def _engines() -> Iterator[str]:
    width = max(14, max(map(len, ENGINES)) + 2)
    for name, row in ENGINES.items():
        yield f"{name:<{width}}{row.where}"


def _tasks() -> Iterator[str]:
    width = max(map(len, TASKS)) + 2
    for task in TASKS:
        yield f"{task:<{width}}{', '.join(judgeable(task))}"


def _recipes() -> Iterator[str]:
    for name, path in shipped().items():
        yield f"{name:<24}{about(path)}"


def _choices(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[object, ...]]]:
    for name, field in model.model_fields.items():
        literals, models = parts_of(type_of(field))
        if literals:
            yield prefix + name, literals
        for inner in models:
            yield from _choices(inner, f"{prefix}{name}.")


def type_of(field: FieldInfo) -> object:
    """Returns the type of a field; of a name of a table, which pydantic keeps next to the type, the `Named`."""
    return next((found for found in field.metadata if isinstance(found, Named)), field.annotation)


def parts_of(annotation: object) -> tuple[tuple[object, ...], list[type[BaseModel]]]:
    """Returns the choices of a type and the configs in it."""
    if isinstance(annotation, Named):
        return tuple(annotation.table), []
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (), [annotation]
    if get_origin(annotation) is Literal:
        return get_args(annotation), []
    literals: tuple[object, ...] = ()
    models: list[type[BaseModel]] = []
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        for argument in get_args(annotation):
            more, inner = parts_of(argument)
            literals, models = literals + more, models + inner
    return literals, models


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]
