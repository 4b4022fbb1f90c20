"""Texts that are spoken, read from the logits of frames: how predictions and labels hold them, and how many words and characters are wrong.

    labels    int32 [n, 2, 1 + T]        of at most T characters, T at least 2

              [:, 0, 0]    number of characters
              [:, 0, 1:]   code points of the true text, -1 behind the last one
              [:, 1, 0]    id of the blank
              [:, 1, 1:]   tokens of the text, -1 behind the last one: characters that the vocabulary lacks are left out where it has no
                           token for unknown ones

    answers   float32 [n, F, 10]         what of the logits [F, V] of a sound is kept (`Part`)

Figures follow jiwer, over all sounds:

    WER   (substitutions + deletions + insertions of words) / words of the true texts
    CER   the same of characters, spaces included

A model from the Hub may write in capitals alone; texts are then brought to its case when they are read, so that figures ignore it as the
field does. Code points are below 2^24, which float32 holds exactly. Tokens of several characters, such as that for unknown ones, count as
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import BLANK, DELIMITER, UNKNOWN, emitted

Array = NDArray[Any]
K = 4
"""Logits that are kept of a frame."""
NOTHING, ABSENT = 0, -1
"""In place of a character: none at this frame; no frame."""
NO_CHARACTER, NO_TOKEN = -1, -1
SEVERAL = 0xF0000
"""First of the code points that stand for tokens of several characters: of a plane for private use."""
LEAST_WIDTH = 3
"""Least last axis of labels, so that they are not taken for tags of words."""


class Part:
    """Where the parts of `answers` stand."""

    CHARACTER = 0
    """The character that begins at the frame, a code point."""
    TOTAL = 1
    """Log of the sum of the exponentials of all logits."""
    IDS = slice(2, 2 + K)
    """The tokens with the largest logits, the largest first; -1 where the vocabulary is smaller."""
    LOGITS = slice(2 + K, 2 + 2 * K)
    """Their logits."""
    WIDTH = 2 + 2 * K


def are_transcripts(labels: Array) -> bool:
    """Whether labels are texts that are spoken."""
    return labels.ndim == 3 and labels.shape[1] == 2 and labels.shape[2] >= LEAST_WIDTH


def code_of(labels: Sequence[str], token: int) -> int:
    """Returns the code point that stands for a token."""
    name = labels[token]
    return ord(" ") if name == DELIMITER else ord(name) if len(name) == 1 else SEVERAL + token


def shown(text: str, labels: Sequence[str]) -> str:
    """Returns a text with the tokens that `SEVERAL` stands for, as `foundation.standalone.response.transcript` writes it."""
    return "".join(labels[ord(one) - SEVERAL] if ord(one) >= SEVERAL else one for one in text)


def labels_of(texts: Sequence[str], labels: Sequence[str]) -> Array:
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
    return made


def _empty(count: int, characters: int, blank: int) -> Array:
    made = np.full((count, 2, max(LEAST_WIDTH, 1 + characters)), NO_TOKEN, np.int32)
    made[:, 0, 0], made[:, 1, 0] = 0, blank
    return made


def true_texts(labels: Array) -> list[str]:
    """Returns the texts of labels."""
    return ["".join(map(chr, row[1 : 1 + row[0]])) for row in labels[:, 0].tolist()]


def texts_of(answers: Array) -> list[str]:
    """Returns the predicted texts; tokens of several characters are one (`SEVERAL`)."""
    codes = answers[..., Part.CHARACTER].astype(np.int64)
    return ["".join(chr(code) for code in row if code > NOTHING).strip() for row in codes.tolist()]


def kept_of_frames(prepared: Preprocessor, rows: Sequence[bytes], logits: Array) -> Array:
    """Returns the compressed logits of a batch, float32 `[b, F, 10]`, F the frames of the longest sounds.

    Args:
        prepared: The preprocessor.
        rows: The encoded sounds.
        logits: Float32 `[b, frames, V]`.
    """
    blank = prepared.labels.index(BLANK)
    codes = np.array([code_of(prepared.labels, token) for token in range(len(prepared.labels))])
    made = np.zeros((len(rows), prepared.positions(prepared.max_length), Part.WIDTH), np.float32)
    made[..., Part.CHARACTER], made[..., Part.IDS] = ABSENT, NO_TOKEN
    for own, frames, whole in zip(made, prepared.sounds.frames(rows), logits, strict=True):
        values = whole[:frames]
        if not np.isfinite(values).all():  # whoever gathers the batches says so
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


def with_answers(labels: Array, answers: Array) -> Array:
    """Returns labels of the same sounds whose true texts are those that a model reads.

    Args:
        labels: The true ones; only the blank is read of them.
        answers: What the model answers.
    """
    texts = texts_of(answers)
    made = _empty(len(labels), max(map(len, texts), default=0), int(labels[0, 1, 0]) if len(labels) else 0)
    for own, text, row in zip(made, texts, answers, strict=True):
        codes = row[:, Part.CHARACTER]
        begun = row[codes > NOTHING, Part.IDS.start].astype(np.int32)
        written = row[codes > NOTHING, Part.CHARACTER] != ord(" ")
        if written.any():  # without the spaces at both ends, as in the text
            first, last = int(written.argmax()), len(written) - int(written[::-1].argmax())
            own[1, 1 : 1 + last - first] = begun[first:last]
        own[0, 0], own[0, 1 : 1 + len(text)] = len(text), list(map(ord, text))
    return made


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


def figures(answers: Array, labels: Array) -> Array:
    """Returns `errors` of predictions and labels, float64 `[n, 4]`."""
    return errors(true_texts(labels), texts_of(answers))


def rate(counts: Array, place: int) -> float:
    """Returns the share of wrong words (place 0) or characters (2) of `errors` `[n, 4]`; without a true one 1, or 0 if none is wrong."""
    wrong, whole = counts[:, place : place + 2].sum(axis=0).tolist()
    return float(wrong / whole) if whole else float(wrong > 0)
