#!/usr/bin/env bash
# llguidance 1.9.1: an answer that follows a JSON schema token by token can be an object that the schema forbids, because a key may be written
# twice. The guess was that an object in progress knows its keys, so that "at least two properties" are two, and a key with a schema of its own
# is not taken for an additional one in another spelling.
#
# Seen (2026-11-28): with {"minProperties": 2} the text {"x": "1", "x": "2"} is accepted to its end, and every reader of JSON makes one property
# of it. With properties: {"a": integer} and additionalProperties: string, the text {"\u0061": "x"} is accepted: the escape is a as well, and the
# answer holds a string where an integer was asked for. {"a": "x"} itself is refused, and so is {"x": "1"} alone. Nothing raises or warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(schema, text):
    """Whether a model may write the text and end there."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.get_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


strings = {"type": "object", "additionalProperties": {"type": "string"}}
two, typed = {**strings, "minProperties": 2}, {**strings, "properties": {"a": {"type": "integer"}}}
cases = (
    (two, '{"x": "1", "y": "2"}', True),
    (two, '{"x": "1"}', False),
    (two, '{"x": "1", "x": "2"}', True),
    (typed, '{"a": 1}', True),
    (typed, '{"a": "x"}', False),
    (typed, r'{"\u0061": "x"}', True),
)
for schema, text, expected in cases:
    taken, valid = accepts(schema, text), Draft202012Validator(schema).is_valid(json.loads(text))
    print(f"llguidance {version('llguidance')}, {json.dumps(schema)}: {text} accepted: {taken}, valid: {valid}")
    assert taken == expected, "the behaviour has changed"
    assert valid == (expected and text not in ('{"x": "1", "x": "2"}', r'{"\u0061": "x"}'))
PYTHON
