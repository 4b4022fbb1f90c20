"""Strict YAML reading: plain types only, and repeated keys are errors."""

from __future__ import annotations

from typing import Any

import yaml

from compress.core.errors import InputError


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that rejects repeated keys."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a plain word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}


_UniqueKeys.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, source: str) -> Any:
    """Parses a YAML text into plain types.

    Raises:
        InputError: The text is not valid YAML, or repeats a key; the message names `source` and the line.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{source}{line}: not a readable recipe: {getattr(error, 'problem', None) or error}") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{source}: not a readable recipe: {error}") from error
