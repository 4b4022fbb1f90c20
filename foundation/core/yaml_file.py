"""YAML as recipes use it: a safe loader that refuses repeated keys and leaves dates as text.

A recipe is trusted like a Makefile (SECURITY.md): no tag builds an object, and a typo ends in one line with its place.
"""

from __future__ import annotations

from typing import Any

import yaml

from foundation.core.errors import InputError
from foundation.core.shown import reason, shown

NULL = "tag:yaml.org,2002:null"
TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Strict(yaml.SafeLoader):
    """A safe loader that refuses repeated keys and leaves dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Reads a map, before merges are written out: PyYAML itself lets the last of two equal keys win."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == NULL:
                raise yaml.composer.ComposerError(None, None, "this key is not a plain word", key.start_mark)
            if key.value in keys:
                raise yaml.composer.ComposerError(None, None, f"key {shown(key.value)} is given twice", key.start_mark)
            keys.add(key.value)
        return node


def parse_yaml(text: str, source: str) -> Any:
    """Parses a YAML text into plain types.

    Args:
        text: The text.
        source: Where the text comes from, for messages.

    Raises:
        InputError: The text is not valid YAML, or repeats a key; the message names `source`, line and column.
    """
    try:
        return yaml.load(text, _Strict)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{source}{line}", f"not a readable recipe: {getattr(error, 'problem', None) or reason(error)}") from error
    except (ValueError, LookupError, RecursionError) as error:  # PyYAML's own arithmetic on a number, or too deep a nesting
        raise InputError(source, f"not a readable recipe: {reason(error)}") from error
