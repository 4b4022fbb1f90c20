"""Log-probabilities of the tokens of an answer, and of the most likely tokens in their places. Needs numpy and tokenizers.

    log p_i = z_i - log sum_j exp z_j       z: the logits of the model, float32

The logits are raw: before the penalties, the temperature, the limits of sampling and the structure of the answer. This is `raw_logprobs`,
the default of vLLM (https://docs.vllm.ai, as of 2026). A token that a structure forces may therefore have a low log-probability.

The output LOGPROBS of a response is a JSON list, one object for each token that wrote a letter of the text:

    id             the token
    token          its text; bytes that are no whole letter are written \\xe2; the name of a special token
    bytes          its bytes, so that letters in several tokens can be put together; null: a special token, which is not in the text
    logprob        log p; -9999 for a probability of 0
    text_offset    number of the letter of the text with which it begins
    top_logprobs   the most likely tokens, best first: id, token, bytes and logprob of each

Tokens of a stop text are left out, as its letters are, and so is an end token. Those between two letters of the text stay.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .decoding_rules import Logits
    from .language_text import LanguageText

LEAST = -9999.0
"""The log-probability of 0, as OpenAI writes it; JSON has no infinity."""
ANCHOR = "a"
"""A token before another one: the first of a text may lose a space."""
MOST_KNOWN = 2**16
"""Tokens in the cache of their texts."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
Entry = dict[str, Any]


class Spelling:
    """How the tokens of one model are written.

    Args:
        text: The text of the model.
    """

    def __init__(self, text: LanguageText) -> None:
        self._text = text
        self._known: dict[tuple[int, bool], Entry] = {}

    def begin(self, most: int) -> Listed:
        """Returns the empty list of a new answer, with so many most likely tokens in each place."""
        return Listed(self, most)

    def entry(self, token: int, logprob: float, *, first: bool) -> Entry:
        """Returns a token with its log-probability.

        Args:
            token: The token.
            logprob: Its log-probability.
            first: Whether it is the first of a text.
        """
        if (token, first) not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[token, first] = self._spelled(token, first)
        return {**self._known[token, first], "logprob": max(logprob, LEAST)}

    def _spelled(self, token: int, first: bool) -> Entry:
        name = self._text.tokenizer.id_to_token(token) or ""
        if token in self._special or not name:
            return {"id": token, "token": name, "bytes": None}
        spelled = self._bytes(name, first)
        try:
            text = spelled.decode("utf-8")
        except UnicodeDecodeError:
            text = spelled.decode("utf-8", "backslashreplace")
        return {"id": token, "token": text, "bytes": list(spelled)}

    def _bytes(self, name: str, first: bool) -> bytes:
        """Returns the bytes that a token adds to a text."""
        if "ByteLevel" in self._steps:
            known = [LETTER_BYTES.get(letter) for letter in name]
            found = [byte for byte in known if byte is not None]
            return bytes(found) if len(found) == len(known) else name.encode("utf-8")  # as the decoder takes added tokens
        if "ByteFallback" in self._steps and (byte := BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        decoder = self._text.tokenizer.decoder
        before = [] if first else [ANCHOR]
        written: str = decoder.decode([*before, name]) if decoder else " ".join([*before, name])
        return written.removeprefix("" if first else ANCHOR).encode("utf-8")

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(token for token, added in self._text.tokenizer.get_added_tokens_decoder().items() if added.special)

    @cached_property
    def _steps(self) -> frozenset[str]:
        """Names of the steps of the decoder."""
        decoder = self._text.tokenizer.decoder
        told: dict[str, Any] = {"type": "None"} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(step["type"] for step in (told["decoders"] if told["type"] == "Sequence" else [told]))


class Listed:
    """The log-probabilities of one answer.

    Args:
        spelling: How its tokens are written.
        most: Number of most likely tokens in each place.
    """

    def __init__(self, spelling: Spelling, most: int) -> None:
        self._spelling, self._most = spelling, most
        self._begun, self._offset = False, 0
        self._waiting: list[Entry] = []

    def take(self, token: int, logits_V: Logits, offset: int) -> None:
        """Takes the next token.

        Args:
            token: The token.
            logits_V: The logits of the model, float32 [V].
            offset: Number of letters before it.

        Raises:
            ValueError: The logits are no numbers.
        """
        logprobs_V, first = log_softmax(logits_V), not self._begun
        self._offset = max(self._offset, offset)  # half a letter may spoil the text before it for a while
        own = self._spelling.entry(token, float(logprobs_V[token]), first=first)
        best = [self._spelling.entry(int(one), float(logprobs_V[one]), first=first) for one in likeliest(logprobs_V, self._most)]
        self._begun = self._begun or own["bytes"] is not None
        self._waiting.append({**own, "text_offset": self._offset, "top_logprobs": best})

    def until(self, letters: int | None) -> str:
        """Returns the tokens that begin before so many letters of the text, None: all, as JSON; none is returned twice."""
        ready = [one for one in self._waiting if letters is None or one["text_offset"] < letters]
        self._waiting = self._waiting[len(ready) :]
        return json.dumps(ready)


def log_softmax(logits_V: Logits) -> NDArray[np.float32]:
    """Returns the logarithms of the probabilities of tokens, float32 [V].

    Raises:
        ValueError: There are none.
    """
    with np.errstate(invalid="ignore"):
        shifted_V = np.asarray(logits_V, np.float32) - np.float32(logits_V.max())
        total = np.exp(shifted_V).sum(dtype=np.float64)
    if not np.isfinite(total):
        raise ValueError("the logits of the model are no numbers")
    return shifted_V - np.float32(np.log(total))


def likeliest(logprobs_V: NDArray[np.float32], most: int) -> NDArray[np.int64]:
    """Returns the ids of the most likely tokens, best first; of equal ones the smaller id."""
    most = min(most, len(logprobs_V))
    if not most:
        return np.zeros(0, np.int64)
    last = np.partition(logprobs_V, -most)[-most]
    found = np.flatnonzero(logprobs_V >= last)
    return found[np.argsort(-logprobs_V[found], kind="stable")][:most]


def _letter_bytes() -> dict[str, int]:
    """Returns the byte of each letter of byte-level BPE (https://github.com/openai/gpt-2, `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


LETTER_BYTES = _letter_bytes()
