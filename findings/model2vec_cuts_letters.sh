#!/usr/bin/env bash
# model2vec 0.10.0: a text is cut by its letters long before it has `max_length` tokens. The guess was that a text of fewer tokens is read whole,
# since the docstring of `encode` calls `max_length` the number of tokens "beyond this length" that are cut.
#
# Seen (2026-11-27): before tokenizing, `encode` takes the first max_length * (median length of the tokens in the vocabulary) letters, and spaces
# count as letters. With the default of 512 tokens and a median of 5, a table of 120 words padded with spaces ends after 2,560 letters: 64 words
# count. A text of 4 long words under max_length=8 is its first 2 words and a piece of the third. Nothing warns. max_length=None reads all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq model2vec==0.10.0 tokenizers==0.23.3 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import model2vec
import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

long_words = ["characteristics", "implementations", "internationally", "representatives"]
words = ["[UNK]"] + [f"row{number:02d}" for number in range(100)] + long_words
tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
vectors = np.random.default_rng(0).standard_normal((len(words), 16)).astype(np.float32)
model = StaticModel(vectors, tokenizer)
place = {word: number for number, word in enumerate(words)}


def words_read(text: list[str], separator: str, **settings: int | None) -> int:
    """Number of leading words whose mean vector is the answer; the word that is cut in two counts as unknown."""
    answer = model.encode(separator.join(text), **settings)
    for count in range(len(text), 0, -1):
        whole = [place[word] for word in text[:count]]
        if any(np.allclose(answer, vectors[ids].mean(axis=0), atol=1e-6) for ids in (whole, [*whole, 0])):
            return count
    raise AssertionError("no mean of leading words")


table = [f"row{number % 100:02d}" for number in range(120)]
seen = {}
for name, text, separator, settings in (
    ("120 words, one space, 512 tokens allowed", table, " ", {}),
    ("120 words, 35 spaces, 512 tokens allowed", table, " " * 35, {}),
    ("120 words, 35 spaces, max_length=None", table, " " * 35, {"max_length": None}),
    ("4 long words, max_length=8", long_words, " ", {"max_length": 8}),
    ("4 long words, max_length=None", long_words, " ", {"max_length": None}),
):
    seen[name] = words_read(text, separator, **settings)
    print(f"model2vec {model2vec.__version__}, median token of {model.median_token_length} letters: {name}: {seen[name]} words read")
assert model.max_length == 512 and model.median_token_length == 5
assert list(seen.values()) == [120, 64, 120, 2, 4], "the behaviour has changed"
PYTHON
