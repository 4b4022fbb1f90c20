"""Answers to questions, as spans of a context: how predictions and labels hold them, and when they are right. Uses only numpy.

A row is a window of the context of a question (`foundation.standalone.windows`); a question has one or more, which follow each other.

    labels    int32 [n, 1 + G, W, 2]   of at most G true answers of W words at most

              [:, 0, 0]    first and last token of the first true answer in the window; both 0, the first token of all, where the window
                           does not hold it
              [:, 0, 1]    number of the question, and whether it has an answer
              [:, 1:]      words of the true answers, two numbers a word; -1 after the last one, and where there are fewer answers

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.answer import Answer
from foundation.labels.form import Labels, first_rows, zeros_beside
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import LONGEST, N_BEST, best_spans
from foundation.standalone.tolerance import MEDIAN_LIMIT
from foundation.standalone.windows import Read, of_each

Words = tuple[tuple[int, int], ...]
"""The words of an answer; () where there is none."""
NO_ANSWER = "no answer"
"""Label of a question without an answer."""
NO_WORD, NO_PLACE = -1, -1
NEVER = np.float32(-1e30)
"""Score of no answer, where there always is one."""
MOST_WORDS = 40
"""Words of a predicted answer; further ones count as part of the last one."""
HEADER = 3
"""Fewest words in labels, so that the entries before them have room."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
NEAR_TIE = 3 * 2 * MEDIAN_LIMIT / 0.6745
"""How far two spans may be apart, in standard deviations of the logits, for an engine that rounds elsewhere to choose the other one: three
standard deviations of the difference of two sums of two logits, each of which is off by `MEDIAN_LIMIT` in the median."""
LEAST_SHARE = 1e-6
"""Probability that all other tokens have at least: below it float32 does not tell."""


class Part:
    """Indices of the parts of `answers`."""

    SCORE, NULL = 0, 1
    """Score of the best span, and of no answer less the threshold: the larger one decides."""
    CHARACTERS = slice(2, 4)
    """Characters of the context that the best span goes from and to."""
    SIDES = slice(4, 4 + 2 * (2 + 2 * N_BEST))
    """For the start and for the end: the logit of the first token, the log of the sum of the exponentials of all, then the places of the
    tokens of the context with the largest logits, in the window, and these logits; places are -1 after the last one."""
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
    """The answer to one question."""

    row: int
    """The window with the best span."""
    none: bool
    """Whether there is no answer."""


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


def labels_of(places: Array, questions: Sequence[int], answerable: Sequence[bool], true: Sequence[Sequence[str]]) -> Spans:
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
    return Spans(made)


def compress_logits(logits: Array, window: Read, context: str, threshold: float | None) -> Array:
    """Returns the compressed logits of one window, float32 `[168]`.

    Args:
        logits: Logits of the window, float32 `[L, 2]`.
        window: Places of its tokens.
        context: The text.
        threshold: See `foundation.standalone.windows.Question`.
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


@dataclass(frozen=True, eq=False)
class Spans(Labels):
    """Labels of windows, int32 `[n, 1 + G, W, 2]`."""

    DTYPE: ClassVar[type] = np.int32

    @property
    def numbers(self) -> Array:
        """The number of the question of each window, int64 `[n]`."""
        return self.array[:, 0, 1, 0].astype(np.int64)

    def questions(self, answers: Array) -> list[Question]:
        """Returns the answer to each question, by its number: the best span of all windows, and the least score of no answer."""
        numbers, found = self.numbers, []
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        for rows in np.split(order, starts[1:]) if len(order) else []:
            best = int(rows[answers[rows, Part.SCORE].argmax()])
            found.append(Question(best, bool(answers[rows, Part.NULL].min() > answers[best, Part.SCORE])))
        return found

    def values(self, answers: Array) -> tuple[Array, Array]:
        """Exact match, F1 and whether there is an answer, for each question, float64 `[q, 3]`."""
        found = self.questions(answers)
        made = np.zeros((len(found), 3))
        for figure, (row, none) in zip(made, found, strict=True):
            predicted = () if none else predicted_words(answers[row])
            true = true_words(self.array[row])
            match, f1 = max(float(predicted == one) for one in true), max(f1_of(predicted, one) for one in true)
            figure[:] = match, f1, self.array[row, 0, 1, 1]
        return zeros_beside(made)

    def count(self) -> int:
        """The number of questions."""
        return len(np.unique(self.numbers))

    def rows_of_values(self) -> Array:
        """The first window of each question."""
        return first_rows(self.numbers)

    def pseudo_labels(self, answers: Array) -> Spans:
        """The answers of the model are the true ones."""
        made = np.full((len(self), 2, MOST_WORDS, 2), NO_WORD, np.int32)
        made[:, 0] = 0
        made[:, 0, :2] = self.array[:, 0, :2]
        numbers = self.numbers
        for number, (row, none) in zip(np.unique(numbers), self.questions(answers), strict=True):
            own = numbers == number
            made[own, 0, 1, 1] = not none
            if not none:
                made[own, 1] = answers[row, Part.WORDS].reshape(-1, 2).astype(np.int32)
        return Spans(made)

    def constants(self, answers: Array) -> Iterator[Array]:
        """Zeros; then no answer to any question."""
        yield np.zeros_like(answers)
        none = np.zeros_like(answers)
        none[:, Part.NULL] = 1
        yield none

    def unit(self, reference: Array) -> float:
        """The standard deviation of the kept logits of the reference: two heads differ by orders of magnitude."""
        return deviation(reference)


def best_threshold(answers: Array, labels: Spans) -> tuple[float, float]:
    """Returns the best shift of the null scores for the mean F1 of all questions, and that F1.

    Every question is decided by the null score minus the score of its best span. With the leads in order, F1 of every
    threshold between two of them is known from sums; the official script does the same. Of equal ones 0 is taken, or else the nearest to
    it.
    """
    found = labels.questions(answers)
    rows = [question.row for question in found]
    numbers = labels.numbers
    nulls = np.array([answers[numbers == numbers[row], Part.NULL].min() for row in rows], np.float64)
    leads = nulls - answers[rows, Part.SCORE]
    true = [true_words(labels.array[row]) for row in rows]
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


class SpanAnswer(Answer):
    """The best span of a window, or none."""

    FORM: ClassVar[type[Labels]] = Spans
    PER_TOKEN: ClassVar[bool] = True
    LABELS: ClassVar[tuple[str, ...] | None] = ("start", "end")
    RESPONSE: ClassVar[str] = "span"
    NOT_ON_GPUS: ClassVar[str | None] = "spans"
    DISAGREEMENT: ClassVar[str] = "1 - F1 against the answers of the float model on {n} windows of selection"

    def compressed(self, preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
        """The best tokens of both sides and the words of the best span, `[b, 168]`."""
        made = np.zeros((len(rows), Part.WORDS.stop), np.float32)
        for kept, row, tokens, values in zip(made, rows, of_each(preprocessor.tokenizer, rows), logits, strict=True):
            read = Read(0, tokens.first, tokens.characters[row.start : row.stop], tokens.others + len(row))
            if not np.isfinite(values[: read.length]).all():  # reported when the batches are gathered
                kept[:] = np.nan
                continue
            kept[:] = compress_logits(values, read, row.context, preprocessor.null_threshold)
        return made

    def numbers(self, outputs: int, positions: int) -> int:
        """The same for every window."""
        return Part.WORDS.stop

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Windows with another answer; differences of the logits of the first token and of those that are kept of both.

        There are hundreds of spans in a window, and many lie close together: another one counts where it is more than `NEAR_TIE` worse to
        the reference.
        """
        ours, theirs = sides_of(reference), sides_of(answers)
        same = _same(ours, theirs)
        apart = np.abs(theirs.logits[:, :, None].astype(np.float64) - ours.logits[..., None])[same]
        first = np.abs(theirs.first.astype(np.float64) - ours.first).reshape(-1)
        changed = (choices(reference) != choices(answers)).any(axis=1)
        changed &= ~self._tied(reference, answers, changed)
        return changed, np.concatenate([first, apart])

    def _tied(self, reference: Array, answers: Array, changed: Array) -> Array:
        """Returns for which changed windows the reference scores the other span almost as high, bool `[n]`."""
        limit, tied = NEAR_TIE * deviation(reference), np.zeros(len(reference), bool)
        for row in np.flatnonzero(changed & ~_none(reference) & ~_none(answers)):
            known, other = (sides_of(of[row : row + 1]) for of in (reference, answers))
            start, end = _best(other)
            here = [known.logits[0, side][known.places[0, side] == place] for side, place in enumerate((start, end))]
            if all(len(found) for found in here):
                tied[row] = float(reference[row, Part.SCORE]) - sum(float(found[0]) for found in here) <= limit
        return tied

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over start and end of KL(p || p'), in nats, where tokens that are not kept of both count as one. Over all tokens it
        would never be less."""
        ours, theirs = sides_of(reference), sides_of(logits)
        same = _same(ours, theirs)
        log_p, log_q = ours.logits.astype(np.float64) - ours.total[..., None], theirs.logits.astype(np.float64) - theirs.total[..., None]
        first_p, first_q = (np.asarray(of.first, np.float64) - of.total for of in (ours, theirs))
        shared_p, shared_q = same.any(axis=3), same.any(axis=2)
        matched = np.where(same, log_q[:, :, None], 0.0).sum(axis=3)  # of each place of the reference, where both keep it
        apart = np.where(shared_p, np.exp(log_p) * (log_p - matched), 0.0).sum(axis=2) + np.exp(first_p) * (first_p - first_q)
        rest_p = _rest(np.exp(first_p) + np.where(shared_p, np.exp(log_p), 0.0).sum(axis=2))
        rest_q = _rest(np.exp(first_q) + np.where(shared_q, np.exp(log_q), 0.0).sum(axis=2))
        return np.asarray(np.maximum(apart + rest_p * np.log(rest_p / rest_q), 0.0).mean(axis=1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """1 - the mean F1 of the words of both answers to each window."""
        pairs = [[() if none else predicted_words(row) for none, row in zip(_none(of), of, strict=True)] for of in (reference, answers)]
        return 1.0 - float(np.mean([f1_of(*pair) for pair in zip(*pairs, strict=True)]))


def deviation(reference: Array) -> float:
    """Returns the standard deviation of the kept logits."""
    sides = sides_of(reference)
    return max(float(np.std(sides.logits[sides.places != NO_PLACE].astype(np.float64))), 1e-12)


def _best(sides: Sides) -> tuple[float, float]:
    """Returns the first and the last token of the best span among the kept ones of a window."""
    starts, ends = sides.places[0]
    sums = sides.logits[0, 0][:, None].astype(np.float64) + sides.logits[0, 1]
    lengths = ends - starts[:, None]
    allowed = (starts[:, None] != NO_PLACE) & (ends != NO_PLACE) & (lengths >= 0) & (lengths < LONGEST)
    first, last = np.unravel_index(np.argmax(np.where(allowed, sums, -np.inf)), sums.shape)
    return float(starts[first]), float(ends[last])


def _same(ours: Sides, theirs: Sides) -> Array:
    """Returns which kept tokens are the same, bool `[n, 2, k, k]`."""
    return np.asarray((ours.places[..., None] == theirs.places[:, :, None]) & (ours.places[..., None] != NO_PLACE))


def _rest(taken: Array) -> Array:
    return np.maximum(1.0 - taken, LEAST_SHARE)


def _none(answers: Array) -> Array:
    return np.asarray(choices(answers)[:, 0] == NO_PLACE)
