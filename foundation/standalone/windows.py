"""Questions with windows of their contexts: what a model that finds answers in a text reads of one that is longer than it can read.

    [CLS] question [SEP] c_1 ... c_r [SEP]          r tokens of the context fit next to the question
    [CLS] question [SEP] c_(r-s+1) ... [SEP]        a window shares s tokens, the stride, with the one before; the last ends the context

The question is never cut. These are the features of the example for SQuAD of Transformers (`truncation="only_second"`, `doc_stride`):
question and context are tokenized together and whole, then cut.

A classifier reads a long text in such windows too, without a question: the tokenizer divides it, and the logits of the windows become those
of the text (`merged`).

Served models hold a copy of this file; it needs only numpy and tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Window:
    """A question and a part of its context."""

    question: str
    context: str
    start: int
    """The first token of the context that is read, counted from 0."""
    stop: int
    """The token after the last one."""

    def __len__(self) -> int:
        """Returns the tokens of the context that are read."""
        return self.stop - self.start

    @property
    def texts(self) -> tuple[str, ...]:
        """The request to a server, which splits the context itself."""
        return self.question, self.context

    @staticmethod
    def tokens(rows: Sequence[Window], tokenizer: Any) -> list[NDArray[np.int32]]:
        """Returns the values of `preprocess.INPUTS` of some windows, int32 `[4, L]` each; see `Paired.cut`."""
        found = of_each(tokenizer, rows)
        return [of.cut(row.start, row.stop) for of, row in zip(found, rows, strict=True)]


@dataclass(frozen=True, eq=False)
class Paired:
    """The tokens of a question and its whole context."""

    ids: NDArray[np.int32]
    """int32 `[L]`."""
    types: NDArray[np.int32]
    """Token type ids, int32 `[L]`."""
    first: int
    """Place of the first token of the context; all of its tokens follow each other."""
    characters: NDArray[np.int64]
    """The characters of the context from and to, of each of its tokens, int64 `[T, 2]`."""

    @property
    def others(self) -> int:
        """Tokens that are not of the context."""
        return len(self.ids) - len(self.characters)

    def cut(self, start: int, stop: int) -> NDArray[np.int32]:
        """Returns ids, mask, token types, and zeros for a decoder, int32 `[4, L]`, without the tokens of the context outside a window."""
        kept = np.ones(len(self.ids), bool)
        kept[self.first : self.first + start] = False
        kept[self.first + stop : self.first + len(self.characters)] = False
        ids = self.ids[kept]
        return np.stack([ids, np.ones_like(ids), self.types[kept], np.zeros_like(ids)])


@dataclass(frozen=True, eq=False)
class Read:
    """Place of the logits of one window, when all windows of a context are concatenated."""

    begin: int
    """Place of its first token, whose logits say that there is no answer."""
    first: int
    """Place of its first token of the context."""
    characters: NDArray[np.int64]
    """The characters of the context from and to, of each of its tokens of the context, int64 `[T, 2]`."""
    length: int
    """Tokens of the window."""


@dataclass(frozen=True)
class Question:
    """A question and how its context is read."""

    context: str
    threshold: float | None
    """No-answer threshold: there is no answer where the null score exceeds the best span score by more. None: there always is one."""
    rows: tuple[Window, ...]
    windows: tuple[Read, ...]


def read_contexts(prepared: Any, pairs: Sequence[tuple[str, str]]) -> list[Question]:
    """Returns how the contexts of questions are read.

    Args:
        prepared: The `Preprocessor`.
        pairs: Questions and contexts.

    Raises:
        ValueError: See `windows`; the message names the row.
    """
    found = []
    for index, (pair, tokens) in enumerate(zip(pairs, paired(prepared.tokenizer, pairs), strict=True)):
        try:
            rows = windows(pair, tokens, prepared.max_length, prepared.stride)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        ends = np.cumsum([tokens.others + len(row) for row in rows]).tolist()
        reads = []
        for row, end in zip(rows, ends, strict=True):
            length = tokens.others + len(row)
            reads.append(Read(end - length, end - length + tokens.first, tokens.characters[row.start : row.stop], length))
        found.append(Question(pair[1], prepared.null_threshold, tuple(rows), tuple(reads)))
    return found


def joined(questions: Sequence[Question], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the logits of the windows of each context one after the other, float32 `[k, L, C]`, zeros behind the last one.

    Args:
        questions: The contexts.
        logits: Logits of all windows of all contexts, in order, float32 `[n, tokens, C]`.
    """
    made = np.zeros((len(questions), max(one.windows[-1].begin + one.windows[-1].length for one in questions), logits.shape[2]), np.float32)
    start = 0
    for whole, one in zip(made, questions, strict=True):
        for window, values in zip(one.windows, logits[start:], strict=False):
            whole[window.begin : window.begin + window.length] = values[: window.length]
        start += len(one.windows)
    return made


def parted(questions: Sequence[Question], rows: Sequence[Window], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the logits of one window of each context, float32 `[n, tokens, C]`, zeros after the last token: the inverse of `joined`.

    Args:
        questions: The context of each row.
        rows: The windows.
        logits: Logits of all windows of each context, float32 `[n, L, C]`.
    """
    reads = [one.windows[one.rows.index(row)] for one, row in zip(questions, rows, strict=True)]
    made = np.zeros((len(rows), max(read.length for read in reads), logits.shape[2]), np.float32)
    for own, read, values in zip(made, reads, logits, strict=True):
        own[: read.length] = values[read.begin : read.begin + read.length]
    return made


def merged(batches: Iterable[tuple[Sequence[int], NDArray[np.float32]]], count: int, aggregate: str) -> NDArray[np.float32]:
    """Pools the logits of windows into the logits of texts, float32 `[count, C]`.

    Args:
        batches: For some windows the indices of their texts, and their logits float32 `[b, C]`; each text has one or more.
        count: Number of texts.
        aggregate: mean or max.
    """
    parts = list(batches)
    owners, values = np.concatenate([part for part, _ in parts]), np.concatenate([values for _, values in parts])
    if aggregate == "max":
        largest = np.full((count, values.shape[1]), -np.inf, np.float32)
        np.maximum.at(largest, owners, values)
        return largest
    sums = np.zeros((count, values.shape[1]))
    np.add.at(sums, owners, values.astype(np.float64))
    return (sums / np.bincount(owners, minlength=count)[:, None]).astype(np.float32)


def paired(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Paired]:
    """Returns the tokens of questions and their contexts.

    Args:
        tokenizer: A tokenizer of the library `tokenizers` that does not truncate.
        pairs: Question and context.
    """
    found = []
    for (_, context), row in zip(pairs, tokenizer.encode_batch(list(pairs)), strict=True):
        places = [place for place, part in enumerate(row.sequence_ids) if part == 1]
        characters = np.array([row.offsets[place] for place in places], np.int64).reshape(-1, 2)
        for token in characters:  # of some tokenizers a token has the space before a word in it
            while token[0] < token[1] and context[token[0]].isspace():
                token[0] += 1
        first = places[0] if places else len(row.ids)
        found.append(Paired(np.array(row.ids, np.int32), np.array(row.type_ids, np.int32), first, characters))
    return found


def of_each(tokenizer: Any, rows: Sequence[Window]) -> list[Paired]:
    """Returns the tokens of the question and the whole context of each window; each pair is tokenized once."""
    pairs = [(row.question, row.context) for row in rows]
    once = list(dict.fromkeys(pairs))
    known = dict(zip(once, paired(tokenizer, once), strict=True))
    return [known[pair] for pair in pairs]


def windows(pair: tuple[str, str], tokens: Paired, max_length: int, stride: int) -> list[Window]:
    """Returns the windows of a context, in order.

    Args:
        pair: Question and context.
        tokens: Their tokens.
        max_length: Most tokens that the model reads.
        stride: Tokens that two windows have in common.

    Raises:
        ValueError: The context has no token, or the question leaves too few for it; one line.
    """
    count, room = len(tokens.characters), max_length - tokens.others
    if not count:
        raise ValueError("a context without a token; a text with words is allowed")
    if room < 1 or (room < count and room <= stride):
        raise ValueError(
            f"a question that takes {tokens.others} of the {max_length} tokens that are read, where windows of the context share {stride}: "
            "shorten it"
        )
    starts = range(0, max(1, count - stride), room - stride) if room < count else range(1)
    return [Window(*pair, start, min(start + room, count)) for start in starts]
