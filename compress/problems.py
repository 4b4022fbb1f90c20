"""Turns validation errors of a config into problems: key path, what was given, what is allowed, nearest key."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from foundation.core.errors import MOST_PROBLEMS, Problem, nearest
from foundation.core.shown import shown, without_credentials


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """Turns pydantic's errors into problems.

    Args:
        error: The error that validating `model` raised.
        model: The config class; supplies the allowed keys.
        prefix: Key path of the config within the recipe.
    """
    problems: dict[Problem, None] = {}
    for problem in error.errors(include_url=False)[: 2 * MOST_PROBLEMS]:  # the search for the nearest key takes its time
        unknown = problem["type"] == "extra_forbidden"  # its last part is a key as the user wrote it, whatever that looks like
        parts, last = (problem["loc"][:-1], problem["loc"][-1:]) if unknown else (problem["loc"], ())
        location, models = _follow(model, [*(part for part in parts if not _is_union_tag(part)), *last])
        path = ".".join(str(part) for part in ([prefix] if prefix else []) + location) or "recipe"
        given = "null" if problem["input"] is None else without_credentials(shown(problem["input"]))
        if unknown:
            allowed = list(dict.fromkeys(key for found in models for key in found.model_fields))
            problems[Problem(path, "unknown key", f"allowed: {', '.join(allowed)}{nearest(str(last[0]), allowed)}")] = None
        elif problem["type"] == "missing":
            problems[Problem(path, "missing", "this key is required")] = None
        else:
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] in ("model_type", "dict_type"):
                message = "a map of keys and values is allowed"
            if problem["input"] is None and problem["type"] != "value_error":
                message += "; leave the key out for its default"
            problems[Problem(path, f"{given} given", f"{message[0].lower()}{message[1:]}")] = None
    return list(problems)


def _is_union_tag(part: object) -> bool:
    # pydantic adds the name of the union member that it tried ("int", "Model", "tuple[...]", "constrained-str") to the path
    if isinstance(part, str) and _PATH.fullmatch(part):  # a key of `search.space`
        return False
    return isinstance(part, str) and (not part.replace("_", "").isalnum() or part[:1].isupper() or part in _PRIMITIVES)


_PATH = re.compile(r"[a-z][a-z0-9_-]*(\.[A-Za-z0-9_-]+)+")
_PRIMITIVES = frozenset({"str", "int", "float", "bool", "none", "dict", "list"})


def _follow(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[int | str], list[type[BaseModel]]]:
    """Follows a pydantic error location through the nested configs.

    Returns:
        The key path as the user wrote it, without the tags of discriminated unions, and the config classes that may contain its last key.
    """
    written: list[int | str] = []
    models = [model]
    for position, part in enumerate(location):
        tagged = [found for found in models if _tag(found) == part]
        if tagged and not any(part in found.model_fields for found in models):
            models = tagged
            continue
        written.append(part)
        if isinstance(part, str) and position < len(location) - 1:
            inside = [inner for found in models if part in found.model_fields for inner in _models_in(found.model_fields[part].annotation)]
            models = inside if any(part in found.model_fields for found in models) else models  # else it is the key of a map
    return written, models


def _tag(model: type[BaseModel]) -> object:
    """Returns the value of `name` that selects this config in a discriminated union, or None if it has no `name`."""
    return model.model_fields["name"].default if "name" in model.model_fields else None


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list, dict):
        return [found for argument in get_args(annotation) for found in _models_in(argument)]
    return []
