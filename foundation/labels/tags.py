"""Tags of words, and the entities that they mark. Uses only numpy.

    John    lives   in    New     York            words, separated by single spaces
    B-PER   O       O     B-LOC   I-LOC           tags: where an entity begins and continues, and of which kind it is

Entities are read from tags by the rules of conlleval, which seqeval has too, so that one reader understands IO, IOB1, IOB2 (BIO), IOBES
(BIOES) and BILOU: an entity ends before O, before another kind, before B or S, and after E or S. A tag without a prefix counts as I. That
reader is the server's (`foundation.standalone.response.spans_of`).

Labels are int32 [n, C + W, 2], C tags and at most W words in a row, so that a metric needs nothing besides them:

    [:, :C]   (code, -1)       what each tag means; the same in every row
    [:, C:]   (tag, piece)     the tag of each word, -1 after the last one, and the place of its first token, -1 for a word that has none
                               because it was truncated away, or consists of characters that the tokenizer drops

    code      0 for O; 1 + 4 k + 0, 1, 2, 3 for B, I, E, S of kind k, kinds counted by their names

Answers are logits float32 [n, L, C] of the first token of each word, in the order of the words; zeros where there is no word. A word
without a token has none, and counts as O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.answer import Answer, divergences
from foundation.labels.form import Labels, zeros_beside
from foundation.standalone import response
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import parts_of

Span = tuple[int, int, str]
"""First word of an entity, the word after its last one, and its kind."""
OUTSIDE = "O"
NO_WORD = -1
NO_PIECE = -1


def kinds_of(names: Sequence[str]) -> list[str]:
    """Returns the kinds of entities of some tags, sorted."""
    return sorted({parts_of(name)[1] for name in names} - {""})


def codes_of(names: Sequence[str]) -> Array:
    """Returns the code of each tag, int32 [C]."""
    kinds = kinds_of(names)
    parts = [parts_of(name) for name in names]
    return np.array([1 + 4 * kinds.index(kind) + "BIES".index(prefix) if kind else 0 for prefix, kind in parts], np.int32)


def spans_of(tags: Sequence[str]) -> list[Span]:
    """Returns the entities of a row of tags, in order."""
    return list(response.spans_of([parts_of(tag) for tag in tags]))


def spans_of_codes(codes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns the entities of a row of codes: first word, the word after the last one, number of the kind."""
    return list(response.spans_of([("BIES"[(code - 1) % 4], (code - 1) // 4) if code else ("", -1) for code in codes]))


def tags_of(spans: Sequence[Span], words: int, names: Sequence[str]) -> list[str]:
    """Returns the tags of a row of words, of those that there are: B and I, with E and S where the names have them.

    Raises:
        KeyError: No tag stands for a kind; the key is the kind.
    """
    known = {parts: name for name in reversed(names) if (parts := parts_of(name))[1]}
    tags = [next((name for name in names if not parts_of(name)[1]), OUTSIDE)] * words
    for start, end, kind in spans:
        for place in range(start, end):
            first, last = place == start, place == end - 1
            wanted = "SBI" if first and last else "BI" if first else "EI" if last else "I"
            found = next((known[prefix, kind] for prefix in (*wanted, *"BE") if (prefix, kind) in known), None)
            if found is None:
                raise KeyError(kind)
            tags[place] = found
    return tags


def labels_of(tags: Sequence[Sequence[str]], pieces: Sequence[Array], names: Sequence[str]) -> Tags:
    """Returns the labels of rows, int32 [n, C + W, 2].

    Args:
        tags: The tags of the words of each row.
        pieces: The place of the first token of each word, int [W] a row.
        names: All tags, by id.
    """
    ids = {name: number for number, name in enumerate(names)}
    most = max((len(row) for row in tags), default=0)
    made = np.full((len(tags), len(names) + most, 2), NO_WORD, np.int32)
    made[:, : len(names), 0] = codes_of(names)
    for labels, row, places in zip(made[:, len(names) :], tags, pieces, strict=True):
        labels[: len(row), 0], labels[: len(row), 1] = [ids[tag] for tag in row], places
    return Tags(made)


def of_words(logits: Array, pieces: Sequence[Array], length: int) -> Array:
    """Returns the answers of rows, float32 [n, length, C].

    Args:
        logits: Logits of all tokens, float32 [n, tokens, C].
        pieces: The place of the first token of each word, int [W] a row; words at and after `length` have none.
        length: At most so many words of a row can have a token.
    """
    answers = np.zeros((len(logits), length, logits.shape[-1]), np.float32)
    for row, places in enumerate(pieces):
        words = np.flatnonzero(places[:length] != NO_PIECE)
        answers[row, words] = logits[row, places[words]]
    return answers


def first_pieces(tokenizer: Any, texts: Sequence[Any]) -> list[Array]:
    """Returns for each text the place of the first token of each of its words, int32 [W].

    Args:
        tokenizer: A tokenizer of the library `tokenizers`, set to truncate as the model needs it.
        texts: Words with single spaces between them.
    """
    return [_first_pieces(text, row) for text, row in zip(texts, tokenizer.encode_batch(list(texts)), strict=True)]


def _first_pieces(text: str, row: Any) -> Array:
    word_of, count = [], 0  # the word of each character; a space belongs to the word after it, as some tokenizers have it
    for character in text:
        count += character == " "
        word_of.append(count)
    found = np.full(count + 1, NO_PIECE, np.int32)
    for place, ((start, end), special) in enumerate(zip(row.offsets, row.special_tokens_mask, strict=True)):
        if not special and text[start:end].strip(" ") and found[word_of[start]] == NO_PIECE:
            found[word_of[start]] = place
    return found


def choices(answers: Array) -> Array:
    """Returns the tag with the largest logit of each word, int64 [n, L]; `NO_WORD` where there is no word."""
    return np.where(are_words(answers), answers.argmax(axis=-1), NO_WORD)


def are_words(answers: Array) -> Array:
    """Returns which places of answers [n, L, C] hold a word with logits, bool [n, L]."""
    return np.asarray((answers != 0).any(axis=-1))


def f1(counts: Array) -> float:
    """Returns F1 of the entities of all rows, of counts [n, 3]; 0 where there is none."""
    right, found, true = counts.sum(axis=0)
    return float(2 * right / (found + true)) if found + true else 0.0


def precision(counts: Array) -> float:
    """Returns the share of the found entities that are right."""
    right, found, _ = counts.sum(axis=0)
    return float(right / found) if found else 0.0


def recall(counts: Array) -> float:
    """Returns the share of the true entities that are found."""
    right, _, true = counts.sum(axis=0)
    return float(right / true) if true else 0.0


@dataclass(frozen=True, eq=False)
class Tags(Labels):
    """Labels of words, int32 `[n, C + W, 2]`."""

    DTYPE: ClassVar[type] = np.int32

    def pseudo_labels(self, answers: Array) -> Tags:
        """The tags that answers have; words without logits get O."""
        count = answers.shape[-1]
        made = self.array.copy()
        given, found = made[:, count:, 0], choices(answers)
        outside = int(np.flatnonzero(self.array[0, :count, 0] == 0)[0]) if len(self) else 0
        predicted = np.full(given.shape, outside)
        width = min(given.shape[1], found.shape[1])
        predicted[:, :width] = np.where(found[:, :width] == NO_WORD, outside, found[:, :width])
        given[:] = np.where(given == NO_WORD, NO_WORD, predicted)
        return Tags(made)

    def _entities(self, answers: Array) -> Iterator[tuple[set[Any], set[Any]]]:
        """Yields the predicted and the true entities of each row: first word, the word after the last one, number of the kind."""
        count = answers.shape[-1]
        for ours, theirs in zip(_codes(self.pseudo_labels(answers).array, count), _codes(self.array, count), strict=True):
            yield set(spans_of_codes(ours)), set(spans_of_codes(theirs))

    def values(self, answers: Array) -> tuple[Array, Array]:
        """For each row the entities that are right, found and true, float64 `[n, 3]`; right: the same words and the same kind."""
        counts = [(len(found & true), len(found), len(true)) for found, true in self._entities(answers)]
        return zeros_beside(np.array(counts, np.float64).reshape(-1, 3))

    def class_counts(self, answers: Array) -> Array | None:
        """Counts of entities of each kind, in the order of the kinds' names."""
        codes = self.array[0, : answers.shape[-1], 0] if len(self) else np.zeros(1, np.int32)
        counts = np.zeros(((int(codes.max()) + 3) // 4, 3), np.int64)
        for found, true in self._entities(answers):
            for place, spans in enumerate((found & true, found, true)):
                for _, _, kind in spans:
                    counts[kind, place] += 1
        return counts

    def class_names(self, names: Sequence[str]) -> Sequence[str]:
        """The kinds of entities."""
        return kinds_of(names)


def _codes(labels: Array, count: int) -> Iterator[list[int]]:
    table = labels[0, :count, 0] if len(labels) else labels
    for row in labels[:, count:, 0]:
        yield table[row[row != NO_WORD]].tolist()


class TagAnswer(Answer):
    """The tag with the largest logit, of each word."""

    FORM: ClassVar[type[Labels]] = Tags
    PER_TOKEN: ClassVar[bool] = True
    RESPONSE: ClassVar[str] = "entities"
    NOT_ON_GPUS: ClassVar[str | None] = "tags"
    DISAGREEMENT: ClassVar[str] = "share of the words of {n} selection rows with another tag"
    CONFIDENCE: ClassVar[str | None] = "tags"

    def compressed(self, preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
        """Logits of the first token of each word, and zeros past the last word, `[b, L, C]`."""
        return of_words(logits, first_pieces(preprocessor.tokenizer, rows), preprocessor.max_length)

    def numbers(self, outputs: int, positions: int) -> int:
        """The outputs at each position."""
        return outputs * positions

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Words with another tag; differences of their logits."""
        words = are_words(reference) | are_words(answers)
        return (choices(reference) != choices(answers))[words], np.abs(answers.astype(np.float64) - reference)[words]

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over the words of a row of KL(p || p') of the probabilities, in nats."""
        words = are_words(reference)
        apart = np.zeros(words.shape)
        apart[words] = divergences(reference[words], logits[words])
        return np.asarray(apart.sum(axis=1) / np.maximum(words.sum(axis=1), 1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The share of words with another tag."""
        changed = self.differences(reference, answers)[0]
        return float(np.mean(changed)) if len(changed) else 0.0

    def other_rows(self, reference: Array, answers: Array) -> Array:
        """Rows in which a word has another tag."""
        return np.asarray((choices(reference) != choices(answers)).any(axis=1))
