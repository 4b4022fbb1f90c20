"""Answers to questions, as spans of a context: how predictions and labels hold them, and when they are right. Uses only numpy.

A row is a window of the context of a question (`foundation.standalone.windows`); a question has one or more, which follow each other.

    labels    int32 [n, 1 + G, W, 2]   of at most G true answers of W words at most

              [:, 0, 0]    first and last token of the first true answer in the window; both 0, the first token of all, where the window
                           does not hold it
              [:, 0, 1]    number of the question, and whether it has an answer
              [:, 1:]      words of the true answers, two numbers a word; -1 behind the last one, and where there are fewer answers

    answers   float32 [n, 168]         what of the logits [L, 2] of a window is kept (`Part`)

Figures follow the official script for SQuAD 2.0. Texts are compared by their words: in lower case, without punctuation and the words
a, an and the, split at white space. A question has the best figure of its true answers:

    exact match   the words are the same
    F1            2 c / (p + t): c words in common, each as often as in both; p words predicted, t true

Where no answer is true, or true answers have no words, both are 1 if nothing is predicted. A word is a hash of 48 bits in two numbers of 24
bits, which float32 holds exactly, so that figures need no text besides predictions and labels.
"""

from __future__ import annotations

import functools
import hashlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import N_BEST, best_spans
from foundation.standalone.windows import Read, Window, of_each

Array = NDArray[Any]
Words = tuple[tuple[int, int], ...]
"""The words of an answer; () where there is none."""
NO_ANSWER = "no answer"
"""Stands among the labels of data in which a question has none."""
NO_WORD, NO_PLACE = -1, -1
NEVER = np.float32(-1e30)
"""Score of no answer, where there always is one."""
MOST_WORDS = 40
"""Words of a predicted answer; further ones count as part of the last one."""
HEADER = 3
"""Least words in labels, so that what stands before them has room."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)


class Part:
    """Where the parts of `answers` stand."""

    SCORE, NULL = 0, 1
    """Score of the best span, and of no answer less the threshold: the larger one decides."""
    CHARACTERS = slice(2, 4)
    """Characters of the context that the best span goes from and to."""
    SIDES = slice(4, 4 + 2 * (2 + 2 * N_BEST))
    """For the start and for the end: the logit of the first token, the log of the sum of the exponentials of all, then the places of the
    tokens of the context with the largest logits, in the window, and these logits; places are -1 behind the last one."""
    WORDS = slice(SIDES.stop, SIDES.stop + 2 * MOST_WORDS)
    """Words of the best span."""


class Sides(NamedTuple):
    """The logits that are kept of both sides."""

    first: Array
    """Logits of the very first token, `[n, 2]`."""
    total: Array
    """Log of the sum of exponentials, `[n, 2]`."""
    places: Array
    """Tokens in the window, `[n, 2, k]`."""
    logits: Array
    """`[n, 2, k]`."""


class Question(NamedTuple):
    """What is answered to one question."""

    row: int
    """The window with the best span."""
    none: bool
    """Whether there is no answer."""


def are_spans(labels: Array) -> bool:
    """Whether labels belong to windows of contexts."""
    return labels.ndim == 4


def words_of(text: str) -> list[str]:
    """Returns the words of an answer, as the official script compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


@functools.lru_cache(maxsize=2**16)
def code_of(word: str) -> tuple[int, int]:
    """Returns the two numbers that stand for a word, below 2^24 each."""
    whole = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=6).digest(), "little")
    return whole >> 24, whole & (2**24 - 1)


def codes_of(text: str) -> Words:
    """Returns the words of an answer as numbers."""
    return tuple(code_of(word) for word in words_of(text))


def labels_of(places: Array, questions: Sequence[int], answerable: Sequence[bool], true: Sequence[Sequence[str]]) -> Array:
    """Returns the labels of windows, int32 `[n, 1 + G, W, 2]`.

    Args:
        places: First and last token of the answer in each window, int `[n, 2]`.
        questions: Number of the question of each window, from 0.
        answerable: Whether each question has an answer.
        true: True answers of each question; empty where nobody asks for figures.
    """
    known = [list(dict.fromkeys(codes_of(text) for text in texts)) for texts in true]
    most = max((len(answers) for answers in known), default=0)
    width = max((len(words) for answers in known for words in answers), default=0)
    table = np.full((len(known), 1 + most, max(HEADER, width), 2), NO_WORD, np.int32)
    for own, answers in zip(table, known, strict=True):
        for number, words in enumerate(answers, 1):
            own[number, : len(words)] = np.array(words, np.int32).reshape(-1, 2)
    numbers = np.asarray(questions, np.int64)
    made = table[numbers]
    made[:, 0] = 0
    made[:, 0, 0], made[:, 0, 1, 0], made[:, 0, 1, 1] = places, numbers, np.asarray(answerable, bool)[numbers]
    return made


def kept_of(logits: Array, window: Read, context: str, threshold: float | None) -> Array:
    """Returns the compressed logits of one window, float32 `[168]`.

    Args:
        logits: Logits of the window, float32 `[L, 2]`.
        window: Where its tokens stand.
        context: The text.
        threshold: See `foundation.standalone.windows.Asked`.
    """
    made = np.zeros(Part.WORDS.stop, np.float32)
    first, values = logits[window.begin], logits[window.first : window.first + len(window.characters)]
    ((score, start, end),) = best_spans(values[:, 0], values[:, 1], 1)
    place = window.characters[start, 0], window.characters[end, 1]
    made[Part.SCORE], made[Part.CHARACTERS] = score, place
    made[Part.NULL] = NEVER if threshold is None else first.sum() - np.float32(threshold)
    sides = made[Part.SIDES].reshape(2, -1)
    for side, own in enumerate(sides):
        ours, real = values[:, side], logits[window.begin : window.begin + window.length, side]
        best = np.argsort(-ours, kind="stable")[:N_BEST]
        own[0], own[1] = first[side], real.max() + np.log(np.exp(real - real.max()).sum())
        own[2 : 2 + N_BEST], own[2 + N_BEST :] = NO_PLACE, 0
        own[2 : 2 + len(best)], own[2 + N_BEST : 2 + N_BEST + len(best)] = window.first - window.begin + best, ours[best]
    made[Part.WORDS] = _stored(context[place[0] : place[1]])
    return made


def kept_of_windows(preprocessor: Preprocessor, rows: Sequence[Window], logits: Array) -> Array:
    """Returns the compressed logits of a batch of windows, float32 `[b, 168]`, from logits float32 `[b, L, 2]`."""
    made = np.zeros((len(rows), Part.WORDS.stop), np.float32)
    for kept, row, tokens, values in zip(made, rows, of_each(preprocessor.tokenizer, rows), logits, strict=True):
        read = Read(0, tokens.first, tokens.characters[row.start : row.stop], tokens.others + len(row))
        if not np.isfinite(values[: read.length]).all():  # whoever gathers the batches says so
            kept[:] = np.nan
            continue
        kept[:] = kept_of(values, read, row.context, preprocessor.null_threshold)
    return made


def _stored(text: str) -> Array:
    """Returns the words of a predicted answer, float32 `[2 * MOST_WORDS]`."""
    words = words_of(text)
    if len(words) > MOST_WORDS:
        words = [*words[: MOST_WORDS - 1], " ".join(words[MOST_WORDS - 1 :])]
    made = np.full((MOST_WORDS, 2), NO_WORD, np.float32)
    for slot, word in zip(made, words, strict=False):
        slot[:] = code_of(word)
    return made.reshape(-1)


def sides_of(answers: Array) -> Sides:
    """Returns the logits that are kept of both sides."""
    sides = answers[:, Part.SIDES].reshape(len(answers), 2, -1)
    return Sides(sides[..., 0], sides[..., 1], sides[..., 2 : 2 + N_BEST], sides[..., 2 + N_BEST :])


def choices(answers: Array) -> Array:
    """Returns the characters from and to of the answer in each window, int64 `[n, 2]`; -1 where none is likelier."""
    none = answers[:, Part.NULL] > answers[:, Part.SCORE]
    return np.where(none[:, None], NO_PLACE, answers[:, Part.CHARACTERS]).astype(np.int64)


def numbers_of(labels: Array) -> Array:
    """Returns the number of the question of each window, int64 `[n]`."""
    return labels[:, 0, 1, 0].astype(np.int64)


def num_questions(labels: Array) -> int:
    """Returns how many questions there are."""
    return len(np.unique(numbers_of(labels)))


def questions(answers: Array, labels: Array) -> list[Question]:
    """Returns the answer to each question, by its number: the best span of all windows, and the least score of no answer."""
    numbers, found = numbers_of(labels), []
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else []:
        best = int(rows[answers[rows, Part.SCORE].argmax()])
        found.append(Question(best, bool(answers[rows, Part.NULL].min() > answers[best, Part.SCORE])))
    return found


def figures(answers: Array, labels: Array) -> Array:
    """Returns of each question exact match, F1 and whether it has an answer, float64 `[q, 3]`."""
    found = questions(answers, labels)
    made = np.zeros((len(found), 3))
    for figure, (row, none) in zip(made, found, strict=True):
        predicted = () if none else predicted_words(answers[row])
        true = true_words(labels[row])
        figure[:] = max(float(predicted == one) for one in true), max(f1_of(predicted, one) for one in true), labels[row, 0, 1, 1]
    return made


def predicted_words(answer: Array) -> Words:
    """Returns the words of the best span of a window."""
    return _words(answer[Part.WORDS].reshape(-1, 2))


def true_words(labels: Array) -> list[Words]:
    """Returns the words of the true answers of a window, of labels `[1 + G, W, 2]`; no words alone where there is none."""
    return [words for words in map(_words, labels[1:]) if words] or [()]


def _words(stored: Array) -> Words:
    return tuple((int(high), int(low)) for high, low in stored if high != NO_WORD)


def f1_of(predicted: Words, true: Words) -> float:
    """Returns F1 of two answers."""
    if not predicted or not true:
        return float(predicted == true)
    common = sum((Counter(predicted) & Counter(true)).values())
    return 2 * common / (len(predicted) + len(true))


def with_answers(labels: Array, answers: Array) -> Array:
    """Returns labels of the same windows whose true answers are those that a model gives."""
    made = np.full((len(labels), 2, MOST_WORDS, 2), NO_WORD, np.int32)
    made[:, 0] = 0
    made[:, 0, :2] = labels[:, 0, :2]
    numbers = numbers_of(labels)
    for number, (row, none) in zip(np.unique(numbers), questions(answers, labels), strict=True):
        own = numbers == number
        made[own, 0, 1, 1] = not none
        if not none:
            made[own, 1] = answers[row, Part.WORDS].reshape(-1, 2).astype(np.int32)
    return made


def best_threshold(answers: Array, labels: Array) -> tuple[float, float]:
    """Returns how much is best taken off the scores of no answer for the mean F1 of all questions, and that F1.

    Every question is decided by the null score minus the score of its best span. With the leads in order, F1 of every
    threshold between two of them is known from sums; the official script does the same. Of equal ones 0 is taken, or else the nearest to
    it.
    """
    found = questions(answers, labels)
    rows = [question.row for question in found]
    numbers = numbers_of(labels)
    nulls = np.array([answers[numbers == numbers[row], Part.NULL].min() for row in rows], np.float64)
    leads = nulls - answers[rows, Part.SCORE]
    true = [true_words(labels[row]) for row in rows]
    with_span = np.array([max(f1_of(predicted_words(answers[row]), one) for one in of) for row, of in zip(rows, true, strict=True)])
    with_none = np.array([float(() in of) for of in true])
    order = np.argsort(leads, kind="stable")
    at = np.concatenate([[leads[order[0]] - 1], (leads[order[:-1]] + leads[order[1:]]) / 2, [leads[order[-1]] + 1]])
    # below a threshold at place i the first i questions keep their spans, the others have none
    totals = np.concatenate([[0], np.cumsum(with_span[order])]) + with_none.sum() - np.concatenate([[0], np.cumsum(with_none[order])])
    ordered = leads[order]
    can = np.concatenate([[True], ordered[:-1] < ordered[1:], [True]])  # equal leads are decided alike
    now = int(np.searchsorted(ordered, 0.0, side="right"))
    best = np.flatnonzero(can & (totals >= totals[can].max() - 1e-9)).tolist()
    chosen = min(best, key=lambda place: abs(at[place]))
    return (0.0 if now in best else float(at[chosen])), float(totals[chosen] / len(rows))
