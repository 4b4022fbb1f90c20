"""Responses of a served model: the names, types and shapes of its outputs, one class for each form.

This single file makes the outputs inside the Triton server, where it is copied next to the model and `preprocess.py`, and says outside what
they have to be. It therefore needs only numpy (1 or 2).

    label    LABEL  STRING [1]    name of the class                                     SCORE, LOGITS as below
             SCORE  FP32   [1]    softmax score of the class; the value for regression
             LOGITS FP32   [C]
    labels   LABEL  STRING [C]    names of all labels, the most likely first            any number of them may hold
             SCORE  FP32   [C]    their sigmoid scores; a label holds if its score is above 0.5
             LOGITS FP32   [C]    in the order of the model
    vector   VECTOR FP32   [D]
    entities ENTITIES STRING [1]  a JSON list of {"entity": "PER", "start": 0, "end": 5, "score": 0.99, "text": "Alice"}: kind, place
                                  in the given text in characters, mean score of its words, and the text there
             LOGITS FP32 [L, C]   of all tokens, padding included
    span     ANSWER STRING [1]    JSON: {"text": "Denver", "start": 31, "end": 37, "score": 11.2, "null_score": -4.1, "probability": 0.93}
             LOGITS FP32 [L, 2]   of the tokens of all windows of the context, one window after the other

    transcript TRANSCRIPT STRING [1]  the text that is spoken
             LOGITS FP32 [F, V]   of all frames, padding included

A transcript is read greedily, as the CTC tokenizer of Transformers does: of each frame the most likely token, of tokens that repeat one,
none for the blank, and a space for the end of a word.

The answer to a question is the span of tokens of its context with the largest sum of the logit that it starts at the first and the logit
that it ends at the last one, of at most 30 tokens, in any window; of equal sums the first and shortest. The null score is the same sum of
the first token of all, the least of all windows: that there is no answer. If it is more than the threshold of the model above the score,
text is empty and start and end are 0. The probability is the softmax over the 20 best spans, and of no answer if the model has a threshold.

Entities are put together from tags by one rule, for the metric (`foundation.labels.tags`) as for the server (`spans_of`): the rule of
conlleval, which reads IO, BIO, BIOES and BILOU. Whose tags they are is one of the strategies that the pipeline of Transformers has:

    first    of words, which take the tag of their first token, as in training and in the metric; the default
    average  of words, whose scores are the means over their tokens
    max      of words, which take the tag of their token with the highest score
    simple   of tokens
    none     a list of all tokens that are not O, each with its whole tag

Words are separated by spaces, as in the data: "U.S." is one word, and "York," is one too, comma included. Transformers guesses words from
tokens, and there both are several.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Array = np.ndarray[Any, Any]
Kind = TypeVar("Kind")
LABEL, SCORE, LOGITS, VECTOR, ENTITIES, ANSWER = "LABEL", "SCORE", "LOGITS", "VECTOR", "ENTITIES", "ANSWER"
TRANSCRIPT = "TRANSCRIPT"
TIER = "TIER"
"""Further output of a cascade, INT32 [1]: number of the tier that answered, from 1."""
STRING, FP32 = "STRING", "FP32"


SCORE_DIFFERENCE = 1e-5
"""How far a served score may be from the score computed here from its logits: the server has another numpy."""


Placed = tuple[str, tuple[tuple[int, int, int], ...]]
"""A text, and of each of its tokens that is not special: its place in the logits, and the characters of the text from and to."""
PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S", "M": "I", "W": "S"}
"""Meaning of the first letter of a tag in every scheme: B begins an entity, I continues it, E ends it, S is an entity of one word."""
_WORD = re.compile(r"[^ \t\r\n]+")


BLANK, UNKNOWN, DELIMITER = "<pad>", "<unk>", "|"
"""Tokens of a transcript: none, a character that the model does not know, and the space between two words."""
N_BEST, LONGEST = 20, 30
"""Spans whose probabilities add up to 1, and the most tokens of an answer."""


@dataclass(frozen=True)
class Output:
    """One output of a served model."""

    name: str
    kind: str
    """STRING or FP32."""
    dims: tuple[int, ...]
    """Its shape without the batch; -1 for the tokens of a request."""


class Response(ABC):
    """One form of response."""

    RAW = LOGITS
    """The output that holds what the engine computed."""

    @abstractmethod
    def outputs(self, width: int) -> tuple[Output, ...]:
        """Returns the outputs of a model with so many logits, or numbers of a vector."""

    @abstractmethod
    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """Returns the outputs by name, `[n, ...]`; strings are UTF-8 bytes in an array of objects.

        Args:
            logits: What the engine computed, float32 `[n, C]`, or `[n, L, C]` of all tokens.
            labels: Names of the logits.
            placed: For entities the texts (`Placed`), for spans the contexts (`windows.Question`), for transcripts the frames that count.
        """

    def scored(self, logits: Array, placed: Sequence[Any] = ()) -> Array:
        """Returns the part of the logits that says how sure the answers are, float32 `[n, ...]` (`confidence.py`): all of them.

        Args:
            logits: As for `of`.
            placed: As for `of`.
        """
        return logits

    def differ(self, got: Array, expected: Array) -> Array:
        """Returns which rows of an output are not as expected, bool `[n]`; scores may differ by `SCORE_DIFFERENCE`."""
        apart = got != expected if expected.dtype == np.object_ else np.abs(got - expected) > SCORE_DIFFERENCE
        return np.asarray(np.asarray(apart).reshape(len(expected), -1).any(axis=1))


class Label(Response):
    """The most likely label; ties take the lowest class id."""

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One label."""
        return Output(LABEL, STRING, (1,)), Output(SCORE, FP32, (1,)), Output(LOGITS, FP32, (width,))

    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """The label with the largest logit and its softmax score; of a single logit its name and value."""
        _check(logits, labels)
        values = np.asarray(logits, dtype=np.float32)
        if len(labels) == 1:
            return {LABEL: _strings([[labels[0]]] * len(values)), SCORE: values, LOGITS: logits}
        best = values.argmax(axis=1)
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        scores = powers[np.arange(len(powers)), best] / powers.sum(axis=1)
        return {LABEL: _strings([[labels[index]] for index in best]), SCORE: scores[:, None], LOGITS: logits}


class Labels(Response):
    """All labels with their scores."""

    def outputs(self, width: int) -> tuple[Output, ...]:
        """As many labels as there are."""
        return Output(LABEL, STRING, (width,)), Output(SCORE, FP32, (width,)), Output(LOGITS, FP32, (width,))

    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """The labels by falling logits, ties by their ids, with 1 / (1 + exp(-logit))."""
        _check(logits, labels)
        values = np.asarray(logits, dtype=np.float32)
        order = np.argsort(-values, axis=1, kind="stable")
        ordered = np.take_along_axis(values, order, axis=1)
        scores = np.exp(-np.logaddexp(np.float32(0), -ordered)).astype(np.float32)
        return {LABEL: _strings([[labels[index] for index in row] for row in order]), SCORE: scores, LOGITS: logits}


class Vector(Response):
    """The vector as it is."""

    RAW = VECTOR

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One vector."""
        return (Output(VECTOR, FP32, (width,)),)

    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """The vectors."""
        return {VECTOR: logits}


class Entities(Response):
    """The entities of each text.

    Args:
        strategy: How they are put together from tokens; see the top of this file.
    """

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One JSON list, and the logits of all tokens."""
        return Output(ENTITIES, STRING, (1,)), Output(LOGITS, FP32, (-1, width))

    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """The entities by their places."""
        _check_tokens(logits, labels, placed)
        found = [entities(values, labels, row, self.strategy) for values, row in zip(logits, placed, strict=True)]
        return {ENTITIES: _strings([[json.dumps(row, ensure_ascii=False)] for row in found]), LOGITS: logits}

    def scored(self, logits: Array, placed: Sequence[Any] = ()) -> Array:
        """Logits of the first token of each word, `[n, words, C]`: it has the tag that the strategy `first` reads. A word without a token
        has zeros, and so have the places after the last word."""
        words = [_words(text, tokens) for text, tokens in placed]
        found = np.zeros((len(words), max([1, *map(len, words)]), np.asarray(logits).shape[-1]), np.float32)
        for row, own in enumerate(words):
            for word, (_, places) in enumerate(own):
                if places:
                    found[row, word] = logits[row][places[0]]
        return found

    def differ(self, got: Array, expected: Array) -> Array:
        """Returns which rows have different entities, or scores that differ by more than `SCORE_DIFFERENCE`."""
        if expected.dtype != np.object_:
            return super().differ(got, expected)
        pairs = [[json.loads(value) for value in row] for row in zip(got.reshape(-1), expected.reshape(-1), strict=True)]
        return np.array([not _same_entities(*pair) for pair in pairs], bool)


class Span(Response):
    """The answer to each question."""

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One JSON object, and the logits of all windows."""
        return Output(ANSWER, STRING, (1,)), Output(LOGITS, FP32, (-1, width))

    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """The best span of all windows of a context."""
        _check_tokens(logits, labels, placed)
        found = [answer(values, row) for values, row in zip(logits, placed, strict=True)]
        return {ANSWER: _strings([[json.dumps(row, ensure_ascii=False)] for row in found]), LOGITS: logits}

    def differ(self, got: Array, expected: Array) -> Array:
        """Returns which rows have a different answer, or figures that differ by more than `SCORE_DIFFERENCE`."""
        if expected.dtype != np.object_:
            return super().differ(got, expected)
        pairs = [[json.loads(value) for value in row] for row in zip(got.reshape(-1), expected.reshape(-1), strict=True)]
        return np.array([not _same_answer(*pair) for pair in pairs], bool)


class Transcript(Response):
    """The text that is spoken."""

    def outputs(self, width: int) -> tuple[Output, ...]:
        """One text, and the logits of all frames."""
        return Output(TRANSCRIPT, STRING, (1,)), Output(LOGITS, FP32, (-1, width))

    def of(self, logits: Array, labels: tuple[str, ...], placed: Sequence[Any] = ()) -> dict[str, Array]:
        """The text of the frames that count."""
        _check_tokens(logits, labels, placed)
        texts = [transcript(values[:frames], labels) for values, frames in zip(logits, placed, strict=True)]
        return {TRANSCRIPT: _strings([[text] for text in texts]), LOGITS: logits}


def placed(prepared: Any, texts: Sequence[Any]) -> list[Any]:
    """Returns where the tokens of texts stand in them (`Placed`), where the response is of entities; of sounds how many frames count, where
    it is a transcript; an empty list for other responses.

    Args:
        prepared: The `Preprocessor`.
        texts: The texts, or encoded sounds.
    """
    if isinstance(RESPONSES[prepared.response], Transcript):
        return list(prepared.sounds.frames(texts))
    if not isinstance(RESPONSES[prepared.response], Entities):
        return []
    rows = prepared.tokenizer.encode_batch(list(texts))
    return [(text, tuple(_placed(row))) for text, row in zip(texts, rows, strict=True)]


def _placed(row: Any) -> Iterator[tuple[int, int, int]]:
    for place, ((start, end), special) in enumerate(zip(row.offsets, row.special_tokens_mask, strict=True)):
        if not special:
            yield place, start, end


def transcript(logits: Array, labels: Sequence[str]) -> str:
    """Returns the text that is spoken.

    Args:
        logits: Logits of the frames that count, float32 `[F, V]`.
        labels: The tokens; `BLANK` and `DELIMITER` are two of them.

    Raises:
        ValueError: A logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise ValueError("the logits of the model are NaN or infinite")
    best = np.asarray(logits).argmax(axis=1)
    tokens = [labels[token] for token in best[emitted(best, labels.index(BLANK))]]
    return "".join(" " if token == DELIMITER else token for token in tokens).strip()


def emitted(best: Array, blank: int) -> Array:
    """Returns at which frames a token begins, bool `[F]`: it is not the blank, and another one than at the frame before.

    Args:
        best: The most likely token of each frame, int `[F]`.
        blank: The id of the blank.
    """
    return np.asarray((best != blank) & (best != np.concatenate([[-1], best[:-1]])))


def entities(logits: Array, labels: tuple[str, ...], placed: Placed, strategy: str) -> list[dict[str, Any]]:
    """Returns the entities of one text, as `ENTITIES` has them.

    Args:
        logits: Logits of its tokens, float32 `[L, C]`.
        labels: Names of the tags.
        placed: The text and the places of its tokens.
        strategy: none, simple, first, average or max.
    """
    values = np.asarray(logits, np.float64)
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True)
    text, tokens = placed
    if strategy in ("none", "simple"):
        words = [(start, end, [place]) for place, start, end in tokens]
    else:
        words = [(*word, places) for word, places in _words(text, tokens)]
    scored = [_score_of_word(scores[places], strategy) if places else None for _, _, places in words]
    names = ["O" if of is None else labels[int(of.argmax())] for of in scored]
    best = [None if of is None else float(of.max()) for of in scored]
    if strategy == "none":
        spans = [(place, place + 1, name) for place, name in enumerate(names) if name != "O"]
    else:
        spans = list(spans_of([parts_of(name) for name in names]))
    made = []
    for first, behind, kind in spans:
        start, end, known = words[first][0], words[behind - 1][1], [score for score in best[first:behind] if score is not None]
        made.append({"entity": kind, "start": start, "end": end, "score": round(sum(known) / len(known), 6), "text": text[start:end]})
    return made


def _words(text: str, tokens: Sequence[tuple[int, int, int]]) -> list[tuple[tuple[int, int], list[int]]]:
    """Returns the place of each word of a text, and the places of its tokens; truncated words have no tokens."""
    found: list[tuple[tuple[int, int], list[int]]] = [(match.span(), []) for match in _WORD.finditer(text)]
    ends = [end for (_, end), _ in found]
    for place, start, end in tokens:
        own = _WORD.search(text, start, end)  # a token may begin with the space before its word
        if own is not None:
            found[bisect_right(ends, own.start())][1].append(place)
    return found


def parts_of(tag: str) -> tuple[str, str]:
    """Returns the prefix of a tag, one of B, I, E, S, and its kind; both empty for O. A tag without a prefix counts as I.

    Spaces around a tag do not count.
    """
    name = tag.strip()
    if name == "O":
        return "", ""
    prefix, dash, kind = name.partition("-")
    return (PREFIXES[prefix], kind) if dash and kind and prefix in PREFIXES else ("I", name)


def spans_of(parts: Sequence[tuple[str, Kind]]) -> Iterator[tuple[int, int, Kind]]:
    """Yields the entities of a row of tags: first word, the word after the last one, kind.

    An entity ends before O, before another kind, before B or S, and after E or S.

    Args:
        parts: Prefix and kind of each tag, as `parts_of` returns them; the prefix is empty for O.
    """
    start = -1
    for place, (prefix, kind) in enumerate(parts):
        if start >= 0 and (not prefix or kind != parts[start][1] or prefix in "BS"):
            yield start, place, parts[start][1]
            start = -1
        if prefix and start < 0:
            start = place
        if prefix and prefix in "ES":
            yield start, place + 1, kind
            start = -1
    if start >= 0:
        yield start, len(parts), parts[start][1]


def best_spans(start: Array, end: Array, count: int) -> list[tuple[float, int, int]]:
    """Returns the spans with the largest sums of logits, the best first: the sum, the first token and the last one.

    Args:
        start: Logits that the answer starts at a token of the context, float32 `[T]`.
        end: Logits that it ends there, float32 `[T]`.
        count: At most so many spans.
    """
    most = min(LONGEST, len(start))
    sums = np.full((len(start), most), -np.inf, np.float32)  # by the first token and how many follow
    for more in range(most):
        sums[: len(start) - more, more] = start[: len(start) - more] + end[more:]
    flat = sums.reshape(-1)
    order = [int(flat.argmax())] if count == 1 else np.argsort(-flat, kind="stable")[:count].tolist()
    return [(float(flat[place]), place // most, place // most + place % most) for place in order if np.isfinite(flat[place])]


def answer(logits: Array, question: Any) -> dict[str, Any]:
    """Returns the answer to one question, as `ANSWER` has it.

    Args:
        logits: Logits of the tokens of all windows, float32 `[L, 2]`.
        question: The context and its windows, `windows.Question`.

    Raises:
        ValueError: A logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise ValueError("the logits of the model are NaN or infinite")
    spans: dict[tuple[int, int], float] = {}  # a span that two windows hold counts once, with the larger sum
    nulls = []
    for window in question.windows:
        values = np.asarray(logits[window.first : window.first + len(window.characters)], np.float32)
        nulls.append(float(np.float32(logits[window.begin, 0]) + np.float32(logits[window.begin, 1])))
        for score, first, last in best_spans(values[:, 0], values[:, 1], N_BEST):
            place = int(window.characters[first, 0]), int(window.characters[last, 1])
            spans[place] = max(score, spans.get(place, score))
    ranked = sorted(spans.items(), key=lambda item: -item[1])[:N_BEST]
    (start, end), score = ranked[0]
    null_score = min(nulls)
    none = question.threshold is not None and null_score - score > question.threshold
    values = np.array([value for _, value in ranked] + [null_score] * (question.threshold is not None), np.float64)
    powers = np.exp(values - values.max())
    start, end = (0, 0) if none else (start, end)
    return {
        "text": question.context[start:end],
        "start": start,
        "end": end,
        "score": round(score, 6),
        "null_score": round(null_score, 6),
        "probability": round(float(powers[-1 if none else 0] / powers.sum()), 6),
    }


def _score_of_word(scores: Array, strategy: str) -> Array:
    """Returns the scores of the tags of a word, float64 `[C]`, from the scores of its tokens `[k, C]`."""
    if strategy == "average":
        return np.asarray(scores.mean(axis=0))
    return np.asarray(scores[scores.max(axis=1).argmax()] if strategy == "max" else scores[0])


def _same_entities(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    scores = [[one.pop("score") for one in of] for of in (got, expected)]
    return got == expected and all(abs(a - b) <= SCORE_DIFFERENCE for a, b in zip(*scores, strict=True))


def _same_answer(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    figures = [[one.pop(name) for name in ("score", "null_score", "probability")] for one in (got, expected)]
    return got == expected and all(abs(a - b) <= SCORE_DIFFERENCE for a, b in zip(*figures, strict=True))


STRATEGIES = ("first", "none", "simple", "average", "max")
"""How entities are put together from tokens, the default first."""
RESPONSES: Mapping[str, Response] = {
    "label": Label(),
    "labels": Labels(),
    "vector": Vector(),
    "entities": Entities(STRATEGIES[0]),
    **{f"entities-{strategy}": Entities(strategy) for strategy in STRATEGIES[1:]},
    "span": Span(),
    "transcript": Transcript(),
}
"""The forms, by the name in preprocess.json."""


def _check(logits: Array, labels: tuple[str, ...]) -> None:
    if logits.ndim != 2 or logits.shape[1] != len(labels):
        raise ValueError(f"logits of shape {logits.shape}; [n, {len(labels)}] expected")


def _check_tokens(logits: Array, labels: tuple[str, ...], placed: Sequence[Any]) -> None:
    if logits.ndim != 3 or logits.shape[2] != len(labels) or len(placed) != len(logits):
        raise ValueError(f"logits of shape {logits.shape} for {len(placed)} texts; [n, tokens, {len(labels)}] expected")


def _strings(rows: list[list[str]]) -> Array:
    width = len(rows[0]) if rows else 1
    return np.array([[text.encode("utf-8") for text in row] for row in rows], dtype=np.object_).reshape(len(rows), width)
