"""Strict YAML reading: plain types only, and repeated keys are errors.

Dates stay text. Tags, aliases that contain themselves, and aliases that stand for more than `MOST_VALUES` values are errors: a text of a
few hundred bytes can otherwise stand for billions of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import yaml

from foundation.core.errors import InputError
from foundation.core.shown import reason, shown

MOST_VALUES = 100_000
DEEPEST = 60
LARGEST = 2**63
"""Integers are smaller than this, which no setting needs."""
MERGE = "tag:yaml.org,2002:merge"
PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
NULLS = ("", "~", "null", "Null", "NULL")
Failure = yaml.constructor.ConstructorError


class _Strict(yaml.SafeLoader):
    """A safe loader that rejects repeated keys and keeps dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _mapping(loader: _Strict, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = "<<" if key_node.tag == MERGE else loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise Failure(None, None, f"key {shown(key)} is not a plain word", key_node.start_mark)
        if key in seen:
            raise Failure(None, None, f"key {shown(key)} is given twice", key_node.start_mark)
        seen.add(key)
    found: dict[Any, Any] = {}
    own: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        value = loader.construct_object(value_node, deep=True)
        if key_node.tag != MERGE:
            own[loader.construct_object(key_node, deep=True)] = value
            continue
        for merged in (value if isinstance(value, list) else [value])[::-1]:  # the first one wins
            if not isinstance(merged, dict):
                raise Failure(None, None, f"<<: {shown(merged)} given; a map, or a list of maps, is allowed", value_node.start_mark)
            found |= merged
    return found | own


def _integer(loader: _Strict, node: yaml.ScalarNode) -> int:
    number = int(loader.construct_yaml_int(node))
    if abs(number) >= LARGEST:
        raise Failure(None, None, f"{shown(node.value)} is too large; integers below 2^63 are allowed", node.start_mark)
    return number


def _float(loader: _Strict, node: yaml.ScalarNode) -> float:
    number = float(loader.construct_yaml_float(node))
    if not math.isfinite(number):
        raise Failure(None, None, f"{shown(node.value)} is not finite; a finite number is allowed", node.start_mark)
    return number


def _bool(loader: _Strict, node: yaml.ScalarNode) -> bool:
    return bool(loader.construct_yaml_bool(node))


def _null(loader: _Strict, node: yaml.ScalarNode) -> None:
    if node.value not in NULLS:
        raise ValueError(node.value)


def _merge(loader: _Strict, node: yaml.ScalarNode) -> None:
    raise Failure(
        None, None, f"{shown(node.value)} stands for a merge, which is a key of a map; quote it where it is text", node.start_mark
    )


def _scalar(build: Callable[[_Strict, yaml.ScalarNode], Any], allowed: str) -> Callable[[_Strict, yaml.ScalarNode], Any]:
    """Returns a constructor whose failures name the place: PyYAML raises whatever its own arithmetic on the text happens to raise."""

    def construct(loader: _Strict, node: yaml.ScalarNode) -> Any:
        try:
            return build(loader, node)
        except (ValueError, LookupError, ArithmeticError, TypeError) as error:
            raise Failure(None, None, f"{shown(node.value)} is {allowed}", node.start_mark) from error

    return construct


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)
_Strict.add_constructor("tag:yaml.org,2002:int", _scalar(_integer, "not a usable number; an integer is allowed"))
_Strict.add_constructor("tag:yaml.org,2002:float", _scalar(_float, "not a usable number; a finite number is allowed"))
_Strict.add_constructor("tag:yaml.org,2002:bool", _scalar(_bool, "neither true nor false; one of both is allowed"))
_Strict.add_constructor("tag:yaml.org,2002:null", _scalar(_null, "not null; null, or nothing, is allowed"))
_Strict.add_constructor(MERGE, _merge)


def parse_yaml(text: str, source: str) -> Any:
    """Parses a YAML text into plain types.

    Raises:
        InputError: The text is not valid YAML, or repeats a key; the message names `source`, line and column.
    """
    loader = None
    try:
        loader = _Strict(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, 1)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{source}{line}: not a readable recipe: {getattr(error, 'problem', None) or reason(error)}") from error
    except RecursionError as error:
        raise InputError(f"{source}: not a readable recipe: nested more than {DEEPEST} levels deep") from error
    except ValueError as error:  # the reader's, of an escape that is no character
        raise InputError(f"{source}: not a readable recipe: {reason(error)}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Returns the number of values that a node stands for, aliases written out.

    Args:
        node: The node; each distinct one is visited once.
        known: The numbers so far by identity; 0 while a node is being counted.
        depth: Number of nodes around this one, and itself.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise Failure(None, None, "an alias that contains itself", node.start_mark)
        return known[id(node)]
    kind = {"tag:yaml.org,2002:map": yaml.MappingNode, "tag:yaml.org,2002:seq": yaml.SequenceNode}.get(node.tag, yaml.ScalarNode)
    if node.tag not in PLAIN or not isinstance(node, kind):
        raise Failure(None, None, f"the tag {shown(node.tag)} is not allowed here; only plain values are", node.start_mark)
    if depth > DEEPEST:
        raise Failure(None, None, f"nested more than {DEEPEST} levels deep", node.start_mark)
    known[id(node)] = 0
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = list(node.value)
    total = 1
    for part in inner:
        total += _count(part, known, depth + 1)
        if total > MOST_VALUES:
            raise Failure(None, None, f"more than {MOST_VALUES} values, aliases written out", node.start_mark)
    known[id(node)] = total
    return total
