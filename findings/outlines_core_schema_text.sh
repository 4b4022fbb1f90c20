#!/usr/bin/env bash
# outlines-core 0.2.14 (the default for JSON in outlines 1.3.3): an answer that follows a schema letter by letter can be no JSON at all. The guess
# was that a schema is carried out or refused, and that whatever an index lets a model finish is at least one JSON value.
#
# Seen (2026-11-28): the regular expressions of the parts of `allOf` are written one behind the other, so that two objects are the only answer,
# and the one object with both properties is refused. A `pattern` is put between two quotation marks as it stands: "^\d+|none$" lets a model
# write "12 without the second mark, and "^.+$" lets it write a third mark, a comma and a key of its own. `minimum`, `maximum` (ge and le of
# pydantic), `multipleOf`, `uniqueItems` and `maxProperties` are skipped. Nothing raises or warns; an unknown `format` of a string is refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq outlines-core==0.2.14 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from jsonschema import Draft202012Validator
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

END = 256
LETTERS = Vocabulary(END, {chr(code): [code] for code in range(32, 127)})


def accepts(schema, text):
    """Whether a model whose tokens are letters may write the text and end there."""
    guide = Guide(Index(build_regex_from_schema(json.dumps(schema)), LETTERS))
    for letter in text:
        if ord(letter) not in guide.get_tokens():
            return False
        guide.advance(ord(letter))
    return END in guide.get_tokens()


def valid(schema, text):
    """Whether the text is JSON, and if so whether the schema allows it."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return "no JSON"
    return Draft202012Validator(schema).is_valid(value)


def part(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


both = {"allOf": [part("a"), part("b")]}
choice, letters = {"type": "string", "pattern": r"^\d+|none$"}, {"type": "string", "pattern": "^.+$"}
name = {"type": "object", "properties": {"name": letters}, "required": ["name"], "additionalProperties": False}
stars = {"type": "integer", "minimum": 1, "maximum": 5}
few = {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1}
cases = (
    (both, '{"a": 1, "b": 2}', False, True),
    (both, '{"a": 1}{"b": 2}', True, "no JSON"),
    (choice, '"12"', False, True),
    (choice, '"12', True, "no JSON"),
    (choice, 'none"', True, "no JSON"),
    (letters, '"a"', True, True),
    (name, '{"name": "a"}', True, True),
    (name, '{"name": "a", "x": "b"}', True, False),
    (name, '{"name": "a" "b"}', True, "no JSON"),
    (stars, "5", True, True),
    (stars, "-70", True, False),
    ({"type": "integer", "multipleOf": 5}, "7", True, False),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", True, False),
    (few, '{"a": 1, "b": 2}', True, False),
)
print(f"outlines-core {version('outlines_core')}")
for schema, text, taken, right in cases:
    seen = accepts(schema, text)
    print(f"{json.dumps(schema)}: {text} accepted: {seen}, valid: {valid(schema, text)}")
    assert valid(schema, text) == right
    assert seen == taken, "the behaviour has changed"
PYTHON
