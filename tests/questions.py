"""Tiny data and a tiny model for tests of question-answering."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

from tests.export.sentiment import drawn
from tests.word_tokenizer import word_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *".,?0123456789", *(f"##{letter}" for letter in LETTERS))
PLACES, COLOURS, THINGS = ("oslo", "rome", "new york", "the hague"), ("red", "blue", "dark green"), ("the ball", "a car", "the old hat")
FILLERS = ("the sun was high .", "nobody knew why .", "it rained .", "and so on .")
WORDS = tuple(
    sorted({word for text in (*PLACES, *COLOURS, *THINGS, *FILLERS, "where what is in colour who ann bob") for word in text.split()})
)
LENGTH = 32
"""Tokens that windows have; contexts have 12 to 45."""
_SCRATCH = tempfile.TemporaryDirectory(prefix="questions-")  # removed when the test run ends


def asked(random: np.random.Generator, unanswerable: float = 0.0) -> dict[str, Any]:
    """Returns a row in the form of the Hub, whose answer can be learned from the words."""
    place, colour = str(random.choice(PLACES)), str(random.choice(COLOURS))
    fillers = [str(text) for text in random.choice(FILLERS, random.integers(2, 10))]
    told = [(f"ann is in {place} .", place, "where is ann ?"), (f"bob is {colour} .", colour, "what colour is bob ?")]
    sentence, answer, question = told[int(random.integers(2))]
    none = bool(random.random() < unanswerable)
    at = int(random.integers(len(fillers)))
    context = " ".join(fillers if none else [*fillers[:at], sentence, *fillers[at:]])
    start = context.find(sentence) + sentence.find(f" {answer} ") + 1
    answers = {"text": [], "answer_start": []} if none else {"text": [answer], "answer_start": [start]}
    return {"id": str(random.integers(10**9)), "title": "x", "context": context, "question": question, "answers": answers}


def rows(count: int, unanswerable: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    """Returns made-up rows."""
    random = np.random.default_rng(seed)
    return [asked(random, unanswerable) for _ in range(count)]


def write(folder: Path, counts: dict[str, int], unanswerable: float = 0.0) -> Path:
    """Writes the splits as jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    found = iter(rows(sum(counts.values()), unanswerable))
    for split, count in counts.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for _, row in zip(range(count), found, strict=False)))
    return folder


def tokenizer() -> Tokenizer:
    """Returns a WordPiece tokenizer with the words, and the letters of others."""
    return word_tokenizer((*PIECES, *WORDS))


@functools.cache
def checkpoint(layers: int = 1) -> Path:
    """Writes a model with a head for spans, once for all tests."""
    folder = Path(_SCRATCH.name) / str(layers)
    config = BertConfig(
        vocab_size=tokenizer().get_vocab_size(), hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, architectures=["BertForQuestionAnswering"],
    )  # fmt: skip
    drawn(BertForQuestionAnswering, config).save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), model_max_length=64, **special).save_pretrained(folder)
    return folder
