"""Strict YAML reading: plain types only, and repeated keys are errors.

Dates stay text. Tags, aliases that contain themselves, and aliases that stand for more than `MOST_VALUES` values are errors: a text of a
few hundred bytes can otherwise stand for billions of values.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from compress.core.errors import InputError
from compress.core.shown import reason, shown

MOST_VALUES = 100_000
DEEPEST = 60
LARGEST = 2**63
"""Integers are smaller than this, which no setting needs."""
MERGE = "tag:yaml.org,2002:merge"
PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
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
    try:
        number = int(loader.construct_yaml_int(node))
    except ValueError as error:  # too many digits, or none: `0x_`
        raise Failure(None, None, f"{shown(node.value)} is not a usable number", node.start_mark) from error
    if abs(number) >= LARGEST:
        raise Failure(None, None, f"{shown(node.value)} is too large; integers below 2^63 are allowed", node.start_mark)
    return number


def _float(loader: _Strict, node: yaml.ScalarNode) -> float:
    try:
        number = float(loader.construct_yaml_float(node))
    except (ValueError, OverflowError) as error:
        raise Failure(None, None, f"{shown(node.value)} is not a usable number", node.start_mark) from error
    if not math.isfinite(number):
        raise Failure(None, None, f"{shown(node.value)} is not finite; a finite number is allowed", node.start_mark)
    return number


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)
_Strict.add_constructor("tag:yaml.org,2002:int", _integer)
_Strict.add_constructor("tag:yaml.org,2002:float", _float)


def parse_yaml(text: str, source: str) -> Any:
    """Parses a YAML text into plain types.

    Raises:
        InputError: The text is not valid YAML, or repeats a key; the message names `source` and the line.
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
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{source}{line}: not a readable recipe: {getattr(error, 'problem', None) or reason(error)}") from error
    except RecursionError as error:
        raise InputError(f"{source}: not a readable recipe: nested more than {DEEPEST} levels deep") from error
    except (ValueError, KeyError) as error:  # KeyError: `!!bool x`
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
