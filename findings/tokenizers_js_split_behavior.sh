#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0 (npm; the tokenizers of Transformers.js 4.3) against tokenizers 0.23.3 (PyPI): six settings of a tokenizer.json are read
# and not carried out.
# The guess was that one file gives one sequence of ids, or that what is not known is refused, as CharDelimiterSplit, UnicodeScripts and Nmt are.
#
# Seen (2026-11-29): `Whitespace`, with which the guides train tokenizers, splits at every letter outside of a to z: "café" is "caf" and "é", and a
# language with accents gets other ids for most sentences. Split knows two of its five behaviors, and "Removed" with a plain string keeps what it is to
# remove, so that [UNK] stands between any two words. Punctuation glues "?!" together, where each mark is a token by default. Metaspace does not split, so
# that a WordPiece model reads a whole sentence as one [UNK]. A BPE with continuing_subword_prefix never merges. single_word of an added token is
# skipped: "na" is cut out of "naive". Nothing warns. BertPreTokenizer, WhitespaceSplit, ByteLevel, Digits and Metaspace before a BPE give the
# same ids for all texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq tokenizers==0.23.3
npm install --silent --no-fund --no-audit --prefix "$folder" @huggingface/tokenizers@0.2.0
cat >"$folder/encode.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const cases = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(({ json, texts }) => {
  const tokenizer = new Tokenizer(json, {});
  return texts.map((text) => tokenizer.encode(text)).map(({ ids, tokens }) => ({ ids, tokens }));
})));
JAVASCRIPT
FOLDER=$folder "$folder/venv/bin/python" - <<'PYTHON'
import json
import os
import subprocess
from importlib.metadata import version

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Digits, Metaspace, PreTokenizer, Punctuation, Sequence, Split, Whitespace, WhitespaceSplit
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

TEXTS = ["the café in Zürich is a naïve idea, what?! 12,345 and 3.14", "wait... the naive résumé"]
SPECIAL = ["[UNK]", "[CLS]", "[SEP]"]


def trained(model: BPE | WordPiece, splits: PreTokenizer, **arguments: str) -> Tokenizer:
    """Trains on the texts themselves, so that every letter and mark has an id."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splits
    trainer = BpeTrainer if isinstance(model, BPE) else WordPieceTrainer
    tokenizer.train_from_iterator(TEXTS * 4, trainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False, **arguments))
    return tokenizer


def bpe(splits: PreTokenizer) -> Tokenizer:
    return trained(BPE(unk_token="[UNK]"), splits)


def pieces(splits: PreTokenizer) -> Tokenizer:
    return trained(WordPiece(unk_token="[UNK]"), splits)


def prefixed() -> Tokenizer:
    return trained(BPE(unk_token="[UNK]", continuing_subword_prefix="##"), WhitespaceSplit(), continuing_subword_prefix="##")


def single_word() -> Tokenizer:
    tokenizer = pieces(BertPreTokenizer())
    tokenizer.add_tokens([AddedToken("na", single_word=True)])
    return tokenizer


cases = (
    ("BPE, WhitespaceSplit", bpe(WhitespaceSplit()), True),
    ("BPE, BertPreTokenizer", bpe(BertPreTokenizer()), True),
    ("BPE, ByteLevel", bpe(ByteLevel(add_prefix_space=False)), True),
    ("BPE, Metaspace", bpe(Metaspace()), True),
    ("BPE, Digits one by one", bpe(Sequence([WhitespaceSplit(), Digits(individual_digits=True)])), True),
    ("BPE, Split isolated", bpe(Split(" ", "isolated")), True),
    ("BPE, Split by an expression, removed", bpe(Split(Regex(r"\s+"), "removed")), True),
    ("WordPiece, BertPreTokenizer", pieces(BertPreTokenizer()), True),
    ("BPE, Whitespace", bpe(Whitespace()), False),
    ("WordPiece, Whitespace", pieces(Whitespace()), False),
    ("BPE, Split removed", bpe(Split(" ", "removed")), False),
    ("BPE, Split merged with next", bpe(Split(" ", "merged_with_next")), False),
    ("BPE, Split merged with previous", bpe(Split(" ", "merged_with_previous")), False),
    ("WordPiece, Punctuation", pieces(Sequence([WhitespaceSplit(), Punctuation()])), False),
    ("WordPiece, Metaspace", pieces(Metaspace()), False),
    ("BPE, continuing_subword_prefix", prefixed(), False),
    ("WordPiece, single_word", single_word(), False),
)
asked = json.dumps([{"json": json.loads(tokenizer.to_str()), "texts": TEXTS} for _, tokenizer, _ in cases])
said = subprocess.run(["node", "encode.mjs"], cwd=os.environ["FOLDER"], input=asked, capture_output=True, text=True, check=True)
assert not said.stderr, said.stderr
print(f"tokenizers {version('tokenizers')}, @huggingface/tokenizers 0.2.0")
for (name, tokenizer, same), found in zip(cases, json.loads(said.stdout), strict=True):
    right = [tokenizer.encode(text) for text in TEXTS]
    equal = [encoding.ids for encoding in right] == [one["ids"] for one in found]
    print(f"{name}: {'the same ids' if equal else 'other ids'}")
    for encoding, one in zip(right, found, strict=True):
        if encoding.ids != one["ids"]:
            print(f"    Python {'|'.join(encoding.tokens)}\n    npm    {'|'.join(one['tokens'])}")
    assert equal == same, "the behaviour has changed"
PYTHON
