"""Answers limited to a JSON schema or a regular expression: the tokens that may come next. Needs llguidance and numpy.

    schema or expression ---> grammar, compiled once and cached ---> of each answer a matcher: a mask over the logits before each token

llguidance reads the tokens from tokenizer.json. That takes about a second for a large vocabulary, and is done for the first answer that
needs it. JSON is written in one line, with the spaces of Python's `json.dumps`: with free spaces a model may write nothing else until its
tokens are over. Letters are not written as numbers (`\\u0061`), since llguidance takes a key in that spelling for another one. Whatever has
no exact meaning here is refused, never approximated:

    keywords that llguidance does not know; `x-guidance` in a schema cannot make it pass over them
    `minProperties` beyond what `required` names: llguidance counts a key that is written twice as two
    numbers beyond 2^53 - 1: llguidance computes in float64, and would write another number than the schema names
    tokenizers whose text is more than the bytes of its tokens: WordPiece, or spaces that are cleaned up

A structure that exceeds the limits below is refused; one that turns out too complex while it is written ends its answer with an error.
Source: https://github.com/guidance-ai/llguidance, release 1.9.1.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .request import JSON_SCHEMA, Refused, Wanted

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from numpy.typing import NDArray

    from .language_text import LanguageText

LARGEST_INTEGER = 2**53 - 1
"""Largest integer up to which float64 holds all."""
MOST_DEPTH = 64
"""Deepest nesting of a schema."""
MOST_CACHED = 32
"""Grammars in the cache."""
COMPILE_FUEL, STEP_FUEL, STEP_ITEMS, MOST_STATES, MOST_SYMBOLS = 1_000_000, 200_000, 50_000, 25_000, 100_000
"""Limits of llguidance: about 20 ms of a core to compile, 14 and 3 ms a token, 50 MB of states, symbols of a grammar."""
JSON_STYLE = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
"""Options that no schema can change."""
NO_TOKEN = ("NoExtension", "Parser Error")
"""How llguidance's error begins where no token can follow, or only a special one, which spells the same letters."""
INSTALL = "pip install llguidance into the environment of the server, or run `compress doctor --fix`"


class Structures:
    """The structures of one model.

    Args:
        text: The text of the model.
        vocabulary: Number of its logits.
        ends: Tokens that end an answer.
    """

    def __init__(self, text: LanguageText, vocabulary: int, ends: Sequence[int]) -> None:
        self._text, self._vocabulary, self._ends = text, vocabulary, list(ends)
        self._lock = threading.Lock()
        self._tokens: tuple[LLTokenizer, NDArray[np.bool_]] | None = None
        self._compiled: OrderedDict[Wanted, LLMatcher] = OrderedDict()

    def begin(self, wanted: Wanted) -> Matched:
        """Returns the structure of a new answer.

        Raises:
            Refused: The structure is wrong, too large, or nothing that this model can write.
        """
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read()
            tokens, stripped_V = self._tokens
            matcher = self._compiled.get(wanted)
            if matcher is None:
                matcher = _compile(wanted, tokens)
                self._compiled[wanted] = matcher
                if len(self._compiled) > MOST_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(wanted)
            return Matched(wanted.name, matcher.deep_copy(), self._ends, stripped_V)

    def _read(self) -> tuple[LLTokenizer, NDArray[np.bool_]]:
        """Returns the tokens, and which lose a space at the start of a text [V]."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise Refused(f"a structure needs llguidance, which is not installed: {INSTALL}") from error
        if not self._ends:
            raise Refused("this model has no end token, which a structure needs; leave the structure out")
        if self._text.settings.clean_up:
            raise Refused("this model removes spaces from its text, so no structure holds; leave the structure out")
        tokenizer = self._text.tokenizer
        size = max(self._vocabulary, tokenizer.get_vocab_size())
        try:
            tokens = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self._ends)
        except ValueError as error:
            raise Refused(f"the tokenizer of this model does not fit a structure: {_line(str(error))}; leave the structure out") from error
        spaced = [token for token in range(tokenizer.get_vocab_size()) if tokens.decode_bytes([token]).startswith(b" ")]
        stripped_V = np.zeros(size, np.bool_)
        stripped_V[[token for token in spaced if not self._text.decode([token]).startswith(" ")]] = True
        return tokens, stripped_V


class Matched:
    """The structure of one answer.

    Args:
        name: JSON_SCHEMA or REGEX.
        matcher: Its state.
        ends: Tokens that end an answer.
        stripped_V: Tokens that lose a space at the start of a text, bool [V]; they cannot be the first.
    """

    def __init__(self, name: str, matcher: LLMatcher, ends: Sequence[int], stripped_V: NDArray[np.bool_]) -> None:
        self._name, self._matcher, self._ends, self._stripped_V = name, matcher, np.array(ends), stripped_V
        self._begun = False

    @property
    def complete(self) -> bool:
        """Whether the answer is complete: no token may follow but an end token."""
        return self._begun and bool(self._matcher.is_stopped())

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Returns whether each token may come next, bool [size].

        Raises:
            Refused: The structure is too complex, or the model has no token that continues it.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        found = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        allowed_V = np.zeros(size, np.bool_)
        allowed_V[: len(found)] = found[:size]
        if not self._begun:
            allowed_V &= ~self._stripped_V[:size]
        if not self._matcher.is_accepting():
            allowed_V[self._ends] = False  # llguidance allows the end where nothing else is possible
        if not allowed_V.any():
            raise self._stuck()
        return allowed_V

    def take(self, token: int) -> None:
        """Takes the next token.

        Raises:
            Refused: The structure is too complex.
        """
        self._begun = True
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error()
            if error.startswith(NO_TOKEN):
                raise self._stuck()
            raise Refused(f"{self._name}: too complex to be followed: {_line(error)}; give a simpler one")

    def _stuck(self) -> Refused:
        return Refused(f"{self._name}: this model has no token that continues such an answer; give another structure")


def _compile(wanted: Wanted, tokens: LLTokenizer) -> LLMatcher:
    """Returns the state before the first token.

    Raises:
        Refused: The structure is wrong or too large.
    """
    from llguidance import LLMatcher

    if wanted.name == JSON_SCHEMA:
        check_schema(wanted.text)
        grammar = LLMatcher.grammar_from_json_schema(wanted.text, overrides=JSON_STYLE)
    else:
        grammar = LLMatcher.grammar_from_regex(wanted.text)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise Refused(f"{wanted.name}: {_line(matcher.get_error())}")
    return matcher


def check_schema(text: str) -> None:
    """Checks a JSON schema for what llguidance reads otherwise than it is meant.

    Raises:
        Refused: It is no JSON object, nested too deeply, or names a number that float64 does not hold.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{JSON_SCHEMA}: not JSON: {_line(str(error))}") from error
    if not isinstance(schema, dict):
        raise Refused(f"{JSON_SCHEMA}: a JSON object is expected")
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise Refused(f"{JSON_SCHEMA}: nested more than {MOST_DEPTH} deep; give a flatter one")
        if isinstance(value, dict) and isinstance(least := value.get("minProperties"), int | float):
            _check_least(least, value.get("required"))
        if isinstance(value, dict | list):
            waiting += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= LARGEST_INTEGER):
            raise Refused(f"{JSON_SCHEMA}: {value} is beyond {LARGEST_INTEGER} and would be written as another number; use a string")


def _check_least(least: float, required: object) -> None:
    named = len(required) if isinstance(required, list) else 0
    if least > max(1, named):
        raise Refused(f"{JSON_SCHEMA}: minProperties {least} given; {max(1, named)} is allowed, or name more keys in `required`")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=COMPILE_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=MOST_STATES,
        max_grammar_size=MOST_SYMBOLS,
        verbose_errors=False,
    )


def _line(message: str) -> str:
    """Returns the message of an error in one short line, without the place in a grammar that nobody has written."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(reasons[:1] or lines)[:200]
