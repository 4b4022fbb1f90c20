#!/usr/bin/env bash
# xgrammar 0.2.8: a string with `minLength` or `maxLength` can hold no line break, quotation mark, backslash or tab. The guess was that a limit of
# 8,000 characters changes nothing for a text of 20.
#
# Seen (2026-11-27): with either keyword every JSON escape is forbidden, with neither all are allowed. A model that wants to quote a word can only
# end its string there, and code or paragraphs come out as one line. llguidance 1.9.1 takes all these texts under the same schemas. Nothing
# warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq xgrammar==0.2.8 torch==2.13.0 llguidance==1.9.1 jsonschema==4.26.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import xgrammar
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"<end>"]
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]), max_threads=1
)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_token_id, bos_token_id, tokens, special_token_ids = 256, None, VOCABULARY, [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def allowed(schema: dict, text: str) -> dict[str, bool]:
    """Whether each engine lets a model write a JSON text under a schema, and end there."""
    assert Draft202012Validator(schema).is_valid(json.loads(text))
    theirs = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    other = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(schema))
    ids = [*text.encode(), 256]
    return {"xgrammar": theirs.accept_string(text) and theirs.accept_token(256), "llguidance": other.validate_tokens(ids) == len(ids)}


print(f"xgrammar {version('xgrammar')}, llguidance {version('llguidance')}")
for limit in ({}, {"maxLength": 8000}, {"minLength": 1}):
    for text in ("plain words", "two\nlines", 'a "quoted" word', "C:\\folder", "a\ttab"):
        written = json.dumps(text)
        seen = allowed({"type": "string"} | limit, written)
        print(f"{limit or 'no limit'}, {written}: {seen}")
        refused = text != "plain words" and bool(limit)
        assert seen["llguidance"]
        assert seen["xgrammar"] != refused, "the behaviour has changed"
PYTHON
