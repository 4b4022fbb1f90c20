#!/usr/bin/env bash
# lm-format-enforcer 0.11.3: a schema whose `type` is a list loses all else that it says. The guess was that {"type": ["object", "null"]} with
# properties is the same object or null, since that is how nullable fields are written.
#
# Seen (2026-11-28): each type of the list becomes a schema of its own, which holds the type alone. A nullable object takes any keys and needs
# none, a nullable array takes any items, a nullable string has no limit and no pattern. The same with anyOf is carried out. An integer may be
# written 1e-5, and `minimum` and `maximum` are skipped. An array without `maxItems` ends after 20 items at the latest: a list of 21 cannot be
# written (the README names the number and LMFE_MAX_JSON_ARRAY_LENGTH). Nothing raises or warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq lm-format-enforcer==0.11.3 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import copy
import json
from importlib.metadata import version

from jsonschema import Draft202012Validator
from lmformatenforcer import JsonSchemaParser


def accepts(schema, text):
    """Whether a model may write the text and end there."""
    parser = JsonSchemaParser(copy.deepcopy(schema))
    for letter in text:
        if letter not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(letter)
    return parser.can_end()


def nullable(schema):
    return {**schema, "type": [schema["type"], "null"]}


def either(schema):
    return {"anyOf": [schema, {"type": "null"}]}


person = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
name, numbers = {"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "integer"}}
stars = {"type": "integer", "minimum": 1, "maximum": 5}
cases = (
    (person, '{"id": 1}', True, True),
    (person, "{}", False, False),
    (either(person), "{}", False, False),
    (nullable(person), '{"id": 1}', True, True),
    (nullable(person), "{}", True, False),
    (nullable(person), '{"id": "one"}', True, False),
    (name, '"abcdef"', False, False),
    (either(name), '"abcdef"', False, False),
    (nullable(name), '"abcdef"', True, False),
    (numbers, '["x"]', False, False),
    (nullable(numbers), '["x"]', True, False),
    (stars, "5", True, True),
    (stars, "70", True, False),
    ({"type": "integer"}, "1e-5", True, False),
    (numbers, json.dumps([7] * 20), True, True),
    (numbers, json.dumps([7] * 21), False, True),
    ({**numbers, "maxItems": 50}, json.dumps([7] * 21), True, True),
)
print(f"lm-format-enforcer {version('lm-format-enforcer')}")
for schema, text, taken, valid in cases:
    seen, right = accepts(schema, text), Draft202012Validator(schema).is_valid(json.loads(text))
    print(f"{json.dumps(schema)}: {text} accepted: {seen}, valid: {right}")
    assert right == valid
    assert seen == taken, "the behaviour has changed"
PYTHON
