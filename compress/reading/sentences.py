"""Sentences whose words have tags: rows of tables and CoNLL files as texts with the entities in them.

    John B-PER            a line for each word: the word first, its tag last, columns separated by spaces or tabs
    lives O
                          an empty line ends a sentence; -DOCSTART- begins a document, and is left out

A sentence becomes its words with single spaces between them, which is what a server is sent too. A word of a table that holds spaces is as
many words, and one without a character is left out. Tags are IOB1, IOB2, IOBES or BILOU (`foundation.labels.tags`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from foundation.core.errors import InputError
from foundation.core.shown import is_unicode, shown
from foundation.data.tables import Cells, Table, opened, suffix, text_lines
from foundation.labels.tags import Span, spans_of

ENDINGS = (".conll", ".txt", ".iob", ".bio")
"""Files that are read as CoNLL."""
_DOCUMENT = "-DOCSTART-"


class Tagged(NamedTuple):
    """The words of a sentence, and their tags."""

    words: int
    spans: list[Span]


def is_conll(path: Path) -> bool:
    """Whether a file has a line for each word."""
    return suffix(path) in ENDINGS


def read_conll(table: Table) -> Iterator[tuple[int, Cells]]:
    """Yields for each sentence the line that it begins in, its words and tags, as lists, and the number of its document.

    Raises:
        InputError: The file cannot be read, or a line has no tag; the message gives the line.
    """
    with opened(table) as stream:
        yield from _sentences(table, stream)


def _sentences(table: Table, stream: BinaryIO) -> Iterator[tuple[int, Cells]]:
    start, document = 0, 0
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate(text_lines(table, stream), 1):
        fields = [field for field in re.split(r"[ \t\r]+", line) if field]
        if not fields or fields[0] == _DOCUMENT:
            if words:
                yield start, (words, tags, document)
            words, tags = [], []
            document += fields[:1] == [_DOCUMENT]
            continue
        if len(fields) < 2:
            raise InputError(table.place(number), f"{shown(line, 40)} has no tag", "a word, and its tag last, are allowed")
        start = start if words else number
        words.append(fields[0])
        tags.append(fields[-1])
    if words:
        yield start, (words, tags, document)


def sentence_of(words: Any, tags: Any, names: tuple[str, ...], place: str) -> tuple[str, Tagged]:
    """Returns the text of a sentence, and how many words and which entities it has.

    Args:
        words: The words, a list.
        tags: The tag of each word: its name, or its place in `names`.
        names: Names of the tags, as a data set numbers them; () if it does not.
        place: Place of the sentence, for messages.

    Raises:
        InputError: They are no lists of words and tags, or not equally long.
    """
    lists = [value.tolist() if isinstance(value, np.ndarray) else value for value in (words, tags)]
    if not all(isinstance(value, list | tuple) for value in lists) or len(lists[0]) != len(lists[1]):
        given = " and ".join(f"{len(v)} entries" if isinstance(v, list | tuple) else shown(v, 40) for v in lists)
        raise InputError(place, f"{given} given as words and tags", "two lists of the same length are allowed")
    named = [_name(tag, names, place) for tag in lists[1]]
    parts, starts = [], [0]
    for word in lists[0]:
        if not isinstance(word, str) or not is_unicode(word):
            raise InputError(place, f"{word!a:.60} given as word", "valid Unicode text is allowed")
        parts += [part for part in re.split(r"[ \t\r\n]+", word) if part]
        starts.append(len(parts))
    spans = [(starts[first], starts[behind], kind) for first, behind, kind in spans_of(named) if starts[first] < starts[behind]]
    return " ".join(parts), Tagged(len(parts), spans)


def _name(tag: object, names: tuple[str, ...], place: str) -> str:
    if isinstance(tag, str) and tag.strip():
        return tag.strip()
    if isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < len(names):
        return names[tag]
    allowed = f"a name such as B-PER, or a number below {len(names)}," if names else "a name such as B-PER"
    raise InputError(place, f"tag {shown(tag, 40)}", f"{allowed} is allowed")
