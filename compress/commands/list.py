"""`compress list` and the recipe reference: everything that a recipe can name, generated from the config classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compress.commands.recipes import about, shipped
from compress.recipe import STAGES, Recipe, schema
from foundation.core.engines import ENGINES
from foundation.core.errors import InputError, nearest
from foundation.core.named import Named
from foundation.labels.tasks import TASKS
from foundation.training.settings import TrainingSettings


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
        raise InputError(f"list {what}: unknown; allowed: {', '.join(lists)}{nearest(what, lists)}")
    return "\n".join(lists[what]())


def _stages() -> Iterator[str]:
    for stage in STAGES:
        yield f"{stage.NAME:<14}{_first_line(stage)}"


def _methods() -> Iterator[str]:
    for stage in STAGES:
        allowed: dict[str, dict[Any, None]] = {}  # the members of a union share keys
        for name, values in _choices(stage):
            allowed.setdefault(name, {}).update(dict.fromkeys(values))
        for name, named in allowed.items():
            yield f"{stage.NAME}.{name}: {', '.join(map(str, named))}"


def _engines() -> Iterator[str]:
    width = max(14, max(map(len, ENGINES)) + 2)
    for name, row in ENGINES.items():
        yield f"{name:<{width}}{row.where}"


def _tasks() -> Iterator[str]:
    yield from TASKS


def _recipes() -> Iterator[str]:
    for name, path in shipped().items():
        yield f"{name:<24}{about(path)}"


def _choices(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, field in model.model_fields.items():
        literals, models = _parts(_type(field))
        if literals:
            yield prefix + name, literals
        for inner in models:
            yield from _choices(inner, f"{prefix}{name}.")


def _type(field: FieldInfo) -> Any:
    """Returns the type of a field; of a name of a table, which pydantic keeps next to the type, the `Named`."""
    return next((found for found in field.metadata if isinstance(found, Named)), field.annotation)


def _parts(annotation: Any) -> tuple[tuple[Any, ...], list[type[BaseModel]]]:
    if isinstance(annotation, Named):
        return tuple(annotation.table), []
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (), [annotation]
    if get_origin(annotation) is Literal:
        return get_args(annotation), []
    literals: tuple[Any, ...] = ()
    models: list[type[BaseModel]] = []
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        for argument in get_args(annotation):
            more, inner = _parts(argument)
            literals, models = literals + more, models + inner
    return literals, models


def reference() -> str:
    """Returns the recipe reference as Markdown, generated from the fields of the config classes and their docstrings."""
    sections: list[tuple[str, str, type[BaseModel]]] = [("The recipe", "", Recipe)]
    sections += [(f"`{name}`", f"{name}.", model) for name, field in Recipe.model_fields.items() for model in _parts(_type(field))[1]]
    sections += [(f"stage `{stage.NAME}`", "", stage) for stage in STAGES]
    unions: set[type[BaseModel]] = set()
    return "\n".join(line for title, prefix, model in sections for line in _section(title, prefix, model, unions))


def _section(title: str, prefix: str, model: type[BaseModel], unions: set[type[BaseModel]]) -> Iterator[str]:
    yield f"### {title}\n\n{_first_line(model)}\n\n| key | allowed | default | meaning |\n| --- | --- | --- | --- |"
    yield from dict.fromkeys(_rows(prefix, model, {model} | unions, unions))  # the configs of a union share keys
    yield ""


def _rows(prefix: str, model: type[BaseModel], shown: set[type[BaseModel]], unions: set[type[BaseModel]]) -> Iterator[str]:
    """Yields the rows of a config; the members of a union, such as the losses, have rows in the first section that has them."""
    shared = TrainingSettings.model_fields if issubclass(model, TrainingSettings) else {}
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] in shared):  # its own settings first
        inner = [nested for nested in _parts(_type(field))[1] if nested not in shown]
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{prefix}{name}` | {_type_text(_type(field))} | {_default_text(field)} | {meaning} |"
        if prefix or not issubclass(model, Recipe):
            shown.update(inner)
            unions.update(inner if len(inner) > 1 else ())
            for nested in inner:
                yield from _rows(f"{prefix}{name}.", nested, shown, unions)


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, Named):
        return ", ".join(f"`{name}`" for name in annotation.table)
    if origin is Annotated:
        return _type_text(next((found for found in arguments if isinstance(found, Named)), arguments[0]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type_text(argument) for argument in arguments if argument is not NoneType))
    if origin in (tuple, list):
        return "list of " + _type_text(arguments[0])
    if origin is dict:
        return "map"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "map"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "`true`, `false`"}
    return names.get(getattr(annotation, "__name__", ""), "any")


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=False)
    if value is None or isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value)}`"


def _first_line(model: type[Any]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]
