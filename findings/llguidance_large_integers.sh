#!/usr/bin/env bash
# llguidance 1.9.1: a JSON schema that names an integer above 2^53, as identifiers of 64 bits are, forces the model to write another integer. The
# guess was that the number of the schema comes out, since `const` leaves nothing to choose.
#
# Seen (2026-11-27): numbers of a schema pass through float64. Under {"const": 1234567890123456789} the only text allowed is 1234567890123456768,
# which the same schema forbids; two neighbours in an enum become one; `minimum` and `maximum` move as well. Nothing raises or warns. The schema
# as text or as a dict makes no difference. Up to 2^53 - 1, and as a string, a number stays what it is.
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

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def forced(schema: dict) -> str:
    """The text that a model has to write, whatever its logits."""
    written = set()
    for grammar in (schema, json.dumps(schema)):
        matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(grammar))
        written.add(bytes(matcher.compute_ff_tokens()).decode())
        assert not matcher.get_error(), matcher.get_error()
    (text,) = written
    return text


identifier = 1234567890123456789
cases = (
    ({"const": 2**53 - 1}, True),
    ({"const": str(identifier)}, True),
    ({"const": identifier}, False),
    ({"enum": [identifier, identifier + 1]}, False),
    ({"type": "integer", "minimum": identifier, "maximum": identifier}, False),
)
for schema, as_named in cases:
    text = forced(schema)
    valid = Draft202012Validator(schema).is_valid(json.loads(text))
    print(f"llguidance {version('llguidance')}, {json.dumps(schema)}: forced text {text}, valid: {valid}")
    assert valid == as_named, "the behaviour has changed"
    assert as_named or text == "1234567890123456768", "the behaviour has changed"
PYTHON
