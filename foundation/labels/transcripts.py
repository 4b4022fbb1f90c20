"""Texts that are spoken, read from the logits of frames: how predictions and labels hold them, and how many words and characters are wrong.

    labels    int32 [n, 2, 1 + T]        of at most T characters, T at least 2

              [:, 0, 0]    number of characters
              [:, 0, 1:]   code points of the true text, -1 after the last one
              [:, 1, 0]    id of the blank
              [:, 1, 1:]   tokens of the text, -1 after the last one: characters that the vocabulary lacks are left out where it has no
                           token for unknown ones

    answers   float32 [n, F, 10]         what of the logits [F, V] of a sound is kept (`Part`)

Figures follow jiwer, over all sounds:

    WER   (substitutions + deletions + insertions of words) / words of the true texts
    CER   the same of characters, spaces included

A model from the Hub may write only capitals; texts are then brought to its case when they are read, so that figures ignore it as the
field does. Code points are below 2^24, which float32 holds exactly. Tokens of several characters, such as that for unknown ones, count as
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foundation.core.arrays import Array
from foundation.labels.answer import Answer
from foundation.labels.form import Labels, zeros_beside
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import BLANK, DELIMITER, UNKNOWN, emitted
from foundation.standalone.tolerance import MEDIAN_LIMIT

K = 4
"""Logits that are kept of a frame."""
NOTHING, ABSENT = 0, -1
"""In place of a character: none at this frame; no frame."""
NO_CHARACTER, NO_TOKEN = -1, -1
SEVERAL = 0xF0000
"""First of the code points that stand for tokens of several characters: of a plane for private use."""
LEAST_WIDTH = 3
"""Least last axis of labels."""
NEAR_TIE = 3 * 2**0.5 * MEDIAN_LIMIT / 0.6745
"""How far two tokens of a frame may be apart, in standard deviations of the logits, for an engine that rounds elsewhere to choose the other
one: three standard deviations of the difference of two logits, each of which is off by `MEDIAN_LIMIT` in the median."""
LEAST_SHARE = 1e-6
"""Probability that all other tokens have at least: below it float32 does not tell."""


class Part:
    """Indices of the parts of `answers`."""

    CHARACTER = 0
    """The character that begins at the frame, a code point."""
    TOTAL = 1
    """Log of the sum of the exponentials of all logits."""
    IDS = slice(2, 2 + K)
    """The tokens with the largest logits, the largest first; -1 where the vocabulary is smaller."""
    LOGITS = slice(2 + K, 2 + 2 * K)
    """Their logits."""
    WIDTH = 2 + 2 * K


def code_of(labels: Sequence[str], token: int) -> int:
    """Returns the code point that stands for a token."""
    name = labels[token]
    return ord(" ") if name == DELIMITER else ord(name) if len(name) == 1 else SEVERAL + token


def shown(text: str, labels: Sequence[str]) -> str:
    """Returns a text with the tokens that `SEVERAL` stands for, as `foundation.standalone.response.transcript` writes it."""
    return "".join(labels[ord(one) - SEVERAL] if ord(one) >= SEVERAL else one for one in text)


def labels_of(texts: Sequence[str], labels: Sequence[str]) -> Transcripts:
    """Returns the labels of texts, int32 `[n, 2, 1 + T]`.

    Args:
        texts: Words with one space between them.
        labels: The vocabulary, with `BLANK` and `DELIMITER`.
    """
    ids = {" " if name == DELIMITER else name: token for token, name in enumerate(labels)}
    unknown = ids.get(UNKNOWN, NO_TOKEN)
    made = _empty(len(texts), max(map(len, texts), default=0), ids[BLANK])
    for own, text in zip(made, texts, strict=True):
        tokens = [token for token in (ids.get(one, unknown) for one in text) if token != NO_TOKEN]
        own[0, 0], own[0, 1 : 1 + len(text)], own[1, 1 : 1 + len(tokens)] = len(text), list(map(ord, text)), tokens
    return Transcripts(made)


def _empty(count: int, characters: int, blank: int) -> Array:
    made = np.full((count, 2, max(LEAST_WIDTH, 1 + characters)), NO_TOKEN, np.int32)
    made[:, 0, 0], made[:, 1, 0] = 0, blank
    return made


def texts_of(answers: Array) -> list[str]:
    """Returns the predicted texts; tokens of several characters are one (`SEVERAL`)."""
    codes = answers[..., Part.CHARACTER].astype(np.int64)
    return ["".join(chr(code) for code in row if code > NOTHING).strip() for row in codes.tolist()]


def errors(true: Sequence[str], predicted: Sequence[str]) -> Array:
    """Returns of each pair of texts the wrong words and the words, the wrong characters and the characters, float64 `[n, 4]`."""
    from jiwer import process_characters, process_words

    made = np.zeros((len(true), 4))
    for counts, reference, found in zip(made, true, predicted, strict=True):
        words, characters = process_words(reference, found), process_characters(reference, found)
        for place, one in ((0, words), (2, characters)):
            wrong = one.substitutions + one.deletions
            counts[place], counts[place + 1] = wrong + one.insertions, one.hits + wrong
    return made


def rate(counts: Array, place: int) -> float:
    """Returns the share of wrong words (place 0) or characters (2) of `errors` `[n, 4]`; without a true one 1, or 0 if none is wrong."""
    wrong, whole = counts[:, place : place + 2].sum(axis=0).tolist()
    return float(wrong / whole) if whole else float(wrong > 0)


@dataclass(frozen=True, eq=False)
class Transcripts(Labels):
    """Labels of sounds, int32 `[n, 2, 1 + T]`."""

    DTYPE: ClassVar[type] = np.int32

    @property
    def texts(self) -> list[str]:
        """The true texts."""
        return ["".join(map(chr, row[1 : 1 + row[0]])) for row in self.array[:, 0].tolist()]

    def values(self, answers: Array) -> tuple[Array, Array]:
        """The `errors` of each sound, float64 `[n, 4]`."""
        return zeros_beside(errors(self.texts, texts_of(answers)))

    def pseudo_labels(self, answers: Array) -> Transcripts:
        """The texts that the model reads are the true ones; only the blank stays."""
        texts = texts_of(answers)
        made = _empty(len(self), max(map(len, texts), default=0), int(self.array[0, 1, 0]) if len(self) else 0)
        for own, text, row in zip(made, texts, answers, strict=True):
            codes = row[:, Part.CHARACTER]
            begun = row[codes > NOTHING, Part.IDS.start].astype(np.int32)
            written = row[codes > NOTHING, Part.CHARACTER] != ord(" ")
            if written.any():  # without the spaces at both ends, as in the text
                first, last = int(written.argmax()), len(written) - int(written[::-1].argmax())
                own[1, 1 : 1 + last - first] = begun[first:last]
            own[0, 0], own[0, 1 : 1 + len(text)] = len(text), list(map(ord, text))
        return Transcripts(made)

    def unit(self, reference: Array) -> float:
        """The standard deviation of the kept logits of the reference: two heads differ by orders of magnitude."""
        return deviation(reference)


class TranscriptAnswer(Answer):
    """The text that is read greedily."""

    FORM: ClassVar[type[Labels]] = Transcripts
    PER_TOKEN: ClassVar[bool] = True
    RESPONSE: ClassVar[str] = "transcript"
    DISAGREEMENT: ClassVar[str] = "word error rate against the texts of the float model on {n} selection rows"

    def compressed(self, preprocessor: Preprocessor, rows: Sequence[Any], logits: Array) -> Array:
        """The character, the sum of exponentials and the largest logits of each frame, `[b, F, 10]`, F the frames of the longest sounds."""
        blank = preprocessor.labels.index(BLANK)
        codes = np.array([code_of(preprocessor.labels, token) for token in range(len(preprocessor.labels))])
        made = np.zeros((len(rows), preprocessor.positions(preprocessor.max_length), Part.WIDTH), np.float32)
        made[..., Part.CHARACTER], made[..., Part.IDS] = ABSENT, NO_TOKEN
        for own, frames, whole in zip(made, preprocessor.sounds.frames(rows), logits, strict=True):
            values = whole[:frames]
            if not np.isfinite(values).all():  # reported when the batches are gathered
                own[:] = np.nan
                continue
            best = np.argsort(-values, axis=1, kind="stable")[:, :K]
            known = best.shape[1]
            highest = values.max(axis=1, keepdims=True)
            of = own[:frames]
            of[:, Part.CHARACTER] = np.where(emitted(best[:, 0], blank), codes[best[:, 0]], NOTHING)
            of[:, Part.TOTAL] = highest[:, 0] + np.log(np.exp(values - highest).sum(axis=1))
            of[:, Part.IDS][:, :known], of[:, Part.LOGITS][:, :known] = best, np.take_along_axis(values, best, axis=1)
        return made

    def numbers(self, outputs: int, positions: int) -> int:
        """The same for every frame."""
        return Part.WIDTH * positions

    def differences(self, reference: Array, answers: Array) -> tuple[Array, Array]:
        """Sounds with another text; differences of the logits that are kept of both.

        There are hundreds of frames in a sound: another text counts where, at a frame with another token, that token is more than
        `NEAR_TIE` worse to the reference.
        """
        changed = np.array([one != other for one, other in zip(texts_of(reference), texts_of(answers), strict=True)], bool)
        changed &= ~self._tied(reference, answers)
        same = _same(reference, answers)
        apart = np.abs(answers[..., None, Part.LOGITS].astype(np.float64) - reference[..., Part.LOGITS, None])
        return changed, apart[same]

    def _tied(self, reference: Array, answers: Array) -> Array:
        """Returns for which sounds the reference scores all the other tokens almost as high, bool `[n]`."""
        theirs = answers[..., Part.IDS.start, None]
        logits = reference[..., Part.LOGITS].astype(np.float64)
        other = np.where(reference[..., Part.IDS] == theirs, logits, -np.inf).max(axis=-1)  # not kept: too far
        limit = NEAR_TIE * deviation(reference)
        return np.asarray((~_real(reference) | (logits[..., 0] - other <= limit)).all(axis=1))

    def distances(self, reference: Array, logits: Array, predicted: Array | None = None) -> Array:
        """The mean over the frames of KL(p || p'), in nats, where tokens that are not kept of both count as one. Over all tokens it
        would never be less."""
        same, real = _same(reference, logits), _real(reference)
        log_p, log_q = (of[..., Part.LOGITS].astype(np.float64) - of[..., Part.TOTAL, None] for of in (reference, logits))
        shared_p, shared_q = same.any(axis=3), same.any(axis=2)
        matched = np.where(same, log_q[:, :, None], 0.0).sum(axis=3)  # of each token of the reference, where both keep it
        apart = np.where(shared_p, np.exp(log_p) * (log_p - matched), 0.0).sum(axis=2)
        rest_p, rest_q = (
            np.maximum(1.0 - np.where(shared, np.exp(log), 0.0).sum(axis=2), LEAST_SHARE)
            for shared, log in ((shared_p, log_p), (shared_q, log_q))
        )
        whole = np.maximum(apart + rest_p * np.log(rest_p / rest_q), 0.0)
        return np.asarray(np.where(real, whole, 0.0).sum(axis=1) / np.maximum(real.sum(axis=1), 1))

    def disagreement(self, reference: Array, answers: Array) -> float:
        """The word error rate of one set of texts against the other, at most 1."""
        return min(1.0, rate(errors(texts_of(reference), texts_of(answers)), 0))


def _real(answers: Array) -> Array:
    return np.asarray(answers[..., Part.CHARACTER] != ABSENT)


def deviation(reference: Array) -> float:
    """Returns the standard deviation of the kept logits."""
    kept = reference[..., Part.LOGITS][reference[..., Part.IDS] != NO_TOKEN]
    return max(float(np.std(kept.astype(np.float64)) if len(kept) else 0.0), 1e-12)


def _same(ours: Array, theirs: Array) -> Array:
    """Returns which kept tokens are the same, bool `[n, F, K, K]`; the first K belong to `ours`."""
    return np.asarray((ours[..., Part.IDS, None] == theirs[..., None, Part.IDS]) & (ours[..., Part.IDS, None] != NO_TOKEN))
