"""Shortens a text that is far longer than what a model reads of it, so that tokenizing it does not hold up others.

A model reads the first `max_length` tokens. Tokenizers look at words: they normalize character by character, split before a space, and then
cut each word by itself. So the tokens of a text that is cut before a space, between two words, are the first tokens of the whole:

    tokens(head + " " + rest) = tokens(head) + tokens(" " + rest)       head ends with a letter or digit, rest begins with one

The head is taken long enough to fill `max_length`. Of a pair each text is shortened so, and the one with more tokens keeps more tokens:
"longest first" then cuts both as it would the whole pair. The ids are exactly the ids of the whole text;
`tests/foundation/standalone/test_long_text.py` holds them against it. Tokenizers also keep what they cut off, of pairs every part next to
every other: their time grows with the product.

This is known of the parts in `LOCAL` and `SPLITS`: the tokenizers of BERT, RoBERTa, XLM-R, ALBERT, DeBERTa, T5 and ModernBERT have no
others. A text that cannot be shortened, because it has no such place or the tokenizer other parts, is refused above `most` characters.

Served models call it; it is copied next to them, and needs only tokenizers.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

MOST_CHARACTERS, MOST_PER_TOKEN = 2**16, 32
"""Characters of a text that is tokenized whole: so many, or so many for each token that the model reads."""
MOST_PRODUCT = 2**18
"""Product of the tokens of the two texts of a pair, if `MOST_PER_TOKEN` times what the model reads, squared, is not more."""
WHOLE = "cannot be cut between two words: shorten it to what the model reads"
"""How a text is refused that would have to be tokenized whole."""
WINDOWS = (8, 32, 128, 512)
"""Characters for each token that the model reads, in which a head is looked for; words have 4 to 5 characters for a token."""
WORD = (
    "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0388-\u03f5\u03f7-\u03ff\u0400-\u0481\u048a-\u052f\u05d0-\u05ea"
    "\u0620-\u064a\u0904-\u0939\uac00-\ud7a3"
)
"""Letters and digits that no normalizer turns into a space, nor joins with one: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari,
Hangul."""
IDEOGRAPHS = "\u4e00-\u9fff"
BETWEEN_WORDS = re.compile(f"(?<=[{WORD}])(?= [{WORD}])")
BETWEEN_IDEOGRAPHS = re.compile(f"(?<=[{IDEOGRAPHS}])(?=[{IDEOGRAPHS}])")
LOCAL = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Replace", "Strip", "StripAccents"}
)
"""Normalizers that change neither a space between two words, nor a word because of what comes after it."""
SPACES = " {2,}"
"""A regular expression that a `Replace` may have."""
SPLITS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace", "Split"})
"""Pre-tokenizers that split before each space between two words; what comes after them sees a word at a time."""
EXPRESSIONS = frozenset(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("", "{1,3}")
)
"""The expressions of Qwen 2 and Llama 3, for `Split`."""


class LongTexts:
    """Shortens texts for one model; safe to share between threads.

    Args:
        tokenizer: The tokenizer, set to truncate on the right to `max_length`, pairs longest first.
        max_length: Most tokens that the model reads.
        prompt: Text that is put before each text.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, prompt: str = "") -> None:
        self._tokenizer, self._max_length, self._prompt = tokenizer, max_length, prompt
        self.most = max(MOST_CHARACTERS, MOST_PER_TOKEN * max_length)

    def shortened(self, row: str | tuple[str, str]) -> str | tuple[str, str]:
        """Returns a text, or a pair of texts, with the same ids.

        Raises:
            ValueError: It is too long, and cannot be shortened.
        """
        if isinstance(row, str):
            return self._head(row, self._max_length, self._prompt)
        return row if max(map(len, row)) <= WINDOWS[0] * self._max_length else self._pair(*row)

    def _pair(self, first: str, second: str) -> tuple[str, str]:
        """Returns both texts, shortened; the one that has more tokens keeps more of them."""
        first_is_long = len(first) > len(second)
        long, short = (first, second) if first_is_long else (second, first)
        if len(short) > self.most:  # which of them has more tokens matters, so one of them is tokenized whole
            raise ValueError(f"texts of {len(first)} and {len(second)} characters; one of them may have more than {self.most}")
        count = self._count(short)
        head = self._head(long, count + 1)  # if this is longer, the whole is
        first_has_more = first_is_long if self._count(head) > count else not first_is_long and count > self._count(head)
        more, less = (first, second) if first_has_more else (second, first)
        less = self._head(less, self._max_length)
        count = self._count(less)
        more = self._head(more, max(self._max_length, count + 1))
        if count * self._count(more) > max(MOST_PRODUCT, (MOST_PER_TOKEN * self._max_length) ** 2):
            raise ValueError(f"texts of {len(first)} and {len(second)} characters, which {WHOLE}")
        return (more, less) if first_has_more else (less, more)

    def _head(self, text: str, tokens: int, prompt: str = "") -> str:
        """Returns the text, cut to so many tokens or some more where that can be done."""
        for window in WINDOWS:
            most = window * tokens
            if len(text) <= most or (window > WINDOWS[0] and most > self.most):
                break
            cut = self._cut(text, most)
            if cut and self._count(prompt + text[:cut]) >= tokens:
                return text[:cut]
        self._check(text)
        return text

    def _check(self, text: str) -> None:
        if len(text) > self.most:
            raise ValueError(f"a text of {len(text)} characters, which {WHOLE}; {self.most} are allowed")

    def _cut(self, text: str, most: int) -> int:
        """Returns the last place within `most` characters where the text may be cut; 0 where there is none."""
        last = 0
        for place in self._places:
            for found in place.finditer(text, 0, most):
                last = max(last, found.start())
        return last

    def _count(self, text: str) -> int:
        """Returns the number of tokens of a text, without those that surround it."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return len(encoded.ids) + sum(len(part.ids) for part in encoded.overflowing)

    @cached_property
    def _places(self) -> tuple[re.Pattern[str], ...]:
        """Pattern of the places where a text may be cut; None if a part of the tokenizer is unknown."""
        normalizers, splits = _parts(self._tokenizer.normalizer, "normalizers"), _parts(self._tokenizer.pre_tokenizer, "pretokenizers")
        looked_for = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()]  # one may reach over a space
        if not splits or not _splits(splits[0]) or not all(_local(one, splits[0]) for one in normalizers) or any(map(_spaced, looked_for)):
            return ()
        apart = bool(normalizers) and normalizers[0].get("handle_chinese_chars") and splits[0]["type"] == "BertPreTokenizer"
        return (BETWEEN_WORDS, BETWEEN_IDEOGRAPHS) if apart else (BETWEEN_WORDS,)


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """Returns the parts of a normalizer or pre-tokenizer, in order, as tokenizer.json describes them."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    parts: list[dict[str, Any]] = []
    waiting = [described]
    while waiting:
        one = waiting.pop(0)
        if one["type"] == "Sequence":
            waiting = [*one[key], *waiting]
        else:
            parts.append(one)
    return parts


def _splits(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer splits before each space between two words."""
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Metaspace":
        return bool(part.get("split", True))
    if kind == "Split":
        return part["pattern"].get("Regex") in EXPRESSIONS and part["behavior"] == "Isolated" and not part["invert"]
    return kind in SPLITS


def _local(part: dict[str, Any], split: dict[str, Any]) -> bool:
    """Whether a normalizer keeps to one side of a space between two words, and leaves the space where `split` finds it."""
    if part["type"] != "Replace":
        return part["type"] in LOCAL
    pattern, content = part["pattern"], part["content"]
    if "Regex" in pattern:
        return bool(pattern["Regex"] == SPACES and content == " ")
    if pattern["String"] == " ":
        return bool(split["type"] == "Metaspace" and content == split["replacement"])
    return not _spaced(pattern["String"] + content)


def _spaced(text: str) -> bool:
    return any(character.isspace() or character == "\u2581" for character in text)
