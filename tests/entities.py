"""Tiny data and a tiny model for tests of token-classification."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from tests.export.sentiment import drawn
from tests.word_tokenizer import word_tokenizer

NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz.,", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"))
WORDS = ("the", "in", "and", "saw", "lives", "ann", "bob", "carl", "oslo", "rome", "new", "york")
LENGTH = 32
_SCRATCH = tempfile.TemporaryDirectory(prefix="entities-")  # removed when the test run ends
_PEOPLE, _PLACES = ("ann", "bob", "carl", "ann bobson", "carl romes"), ("oslo", "rome", "new york", "osloby")


def sentence(random: np.random.Generator) -> tuple[list[str], list[str]]:
    """Returns words and tags; the tags can be learned from the words."""
    words, tags = [], []
    for kind in random.choice(["PER", "LOC", ""], random.integers(2, 6)):
        chosen = {"PER": _PEOPLE, "LOC": _PLACES, "": ("the", "in", "and", "saw", "lives")}[kind]
        found = str(random.choice(chosen)).split()
        words += ["saw", *found] if kind else found
        tags += ["O", *(f"{'BI'[place > 0]}-{kind}" for place in range(len(found)))] if kind else ["O"]
    return words, tags


def sentences(count: int, seed: int = 0) -> list[tuple[list[str], list[str]]]:
    """Returns made-up sentences."""
    random = np.random.default_rng(seed)
    return [sentence(random) for _ in range(count)]


def write(folder: Path, counts: dict[str, int]) -> Path:
    """Writes the splits as jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    found = iter(sentences(sum(counts.values())))
    for split, count in counts.items():
        rows = [{"tokens": words, "labels": tags} for _, (words, tags) in zip(range(count), found, strict=False)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tokenizer() -> Tokenizer:
    """Returns a WordPiece tokenizer with the words, and the letters of others."""
    return word_tokenizer((*PIECES, *WORDS))


@functools.cache
def checkpoint(layers: int = 1, names: Sequence[str] = NAMES) -> Path:
    """Writes a model with a head for these tags, once for all tests."""
    folder = Path(_SCRATCH.name) / f"{layers}-{'-'.join(names)}"
    config = BertConfig(
        vocab_size=len(PIECES + WORDS), hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, architectures=["BertForTokenClassification"],
        id2label=dict(enumerate(names)), label2id={name: number for number, name in enumerate(names)},
    )  # fmt: skip
    drawn(BertForTokenClassification, config).save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), model_max_length=64, **special).save_pretrained(folder)
    return folder
