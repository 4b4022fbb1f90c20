"""Plain text: rows without labels, to learn a teacher's answers on, or a corpus to learn its inside on.

A file of tsv, csv, json, jsonl or parquet gives a row for each of its rows, a text file (.txt) one for each line, a folder those of all
such files in it, in the order of their names, a data set of the Hub those of one split; each also as .gz. Rows of nothing but blanks are
left out. `packed` cuts a corpus into pieces of as many tokens as a row may have:

    lines -> tokens -> a line that is too long is cut between words, short ones that follow each other are joined by a line feed;
    each piece is tokenized by itself to see that it fits

Rows that equal an evaluation or selection row are never learned from: `new_rows` leaves them out. Blanks around a text do not count, and
where those rows are pairs, neither of their two texts is learned from alone, nor put together with another of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tokenizers import Encoding, Tokenizer

from compress.core.config import Config
from compress.core.errors import InputError
from compress.data import tables
from compress.data.config import ColumnName
from compress.data.splits import content_key
from compress.standalone.preprocess import Row

CHUNK = 1024


class PlainText(Config):
    """Text without labels."""

    path: Annotated[str, Field(min_length=1)]
    """A file of csv tsv txt json jsonl parquet (.gz too; a line of txt is a row), a folder of such files, or a Hub id (owner/name)."""
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split of a Hub data set."""
    text: ColumnName = "text"
    """The column of the text, or of the first of a pair; by position where a file has no header."""
    text_pair: ColumnName | None = None
    """The column of the second text of a pair; needed where the rows of the data are pairs."""
    header: bool = True
    """Whether the first line of a tsv or csv names the columns."""


def read_plain(config: PlainText, key: str, log: Callable[[str], None] = lambda message: None) -> list[Row]:
    """Returns the rows: texts, or pairs of texts where a second column is given.

    Args:
        config: What to read.
        key: Its key path in the recipe, for messages.
        log: Where to tell that something may be downloaded.

    Raises:
        InputError: It cannot be read, holds something else than text, or no text at all.
    """
    where = Path(config.path).expanduser()
    if where.is_dir():
        files = [path for path in sorted(where.iterdir()) if path.is_file() and tables.suffix(path) in tables.TABLES]
    else:
        files = [where] if where.exists() else []
    if not files and (where.exists() or config.path.count("/") != 1 or config.path.startswith((".", "/", "~"))):
        raise InputError(f"{key}.path: {config.path} given; a file ({' '.join(tables.TABLES)}), a folder of them or a Hub id is allowed")
    try:
        if not files:
            log(f"{key}: reading {config.path} from the Hub or its cache")
        rows = list(_read(config, tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)))
    except InputError as error:
        raise InputError(*(re.sub(r"\bdata\.path\b", f"{key}.path", problem) for problem in error.problems)) from error
    if not rows:
        raise InputError(f"{key}.path: {config.path}: holds no text; at least one row is needed")
    return rows


@lru_cache(maxsize=2)
def _read(config: PlainText, files: tuple[tuple[str, int, int], ...]) -> tuple[Row, ...]:
    """Reads all files, or the Hub where there are none; kept in memory until a file changes."""
    if files:
        return tuple(row for path, _, _ in files for row in _rows_of(Path(path), config))
    columns = _columns(config)
    positions = [column for column in columns if isinstance(column, int)]
    if positions:
        raise InputError(f"data.path {config.path}: column {positions[0]} given; a data set of the Hub names its columns")
    found = tables.read_hub(config.path, config.subset, [str(column) for column in columns], lambda message: None)
    if config.split not in found:
        raise InputError(f"data.path {config.path}: no split {config.split!r}; it has {', '.join(found)}")
    return tuple(_texts(enumerate(found[config.split][0], 1), f"{config.path} split {config.split} row"))


def _rows_of(path: Path, config: PlainText) -> Iterator[Row]:
    if tables.suffix(path) == ".txt":
        return _texts(((number, (line,)) for number, line in enumerate(tables.read_document(path).split("\n"), 1)), f"{path} line")
    table = tables.Table(path, _columns(config), config.header)
    return _texts(tables.read_table(table), f"{path} {table.unit}")


def _columns(config: PlainText) -> tuple[ColumnName, ...]:
    return (config.text,) if config.text_pair is None else (config.text, config.text_pair)


def _texts(cells: Iterable[tuple[int, tables.Cells]], where: str) -> Iterator[Row]:
    for number, found in cells:
        for text in found:
            if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(f"{where} {number}: {text!a:.60} given as text; a text of Unicode characters is allowed")
        texts = [text.strip() for text in found]
        if any(texts):
            yield texts[0] if len(texts) == 1 else (texts[0], texts[1])


def digest(rows: Sequence[Row]) -> str:
    """Returns the sha256 (hex) of the contents of some rows, in their order."""
    return hashlib.sha256(b"".join(content_key(row) for row in rows)).hexdigest()


def new_rows(rows: Sequence[Row], held_out: Iterable[Row], known: Iterable[Row]) -> tuple[list[Row], int, int]:
    """Returns the rows that are not there yet, how many hold nothing but texts that are held out, and how many are there already.

    Args:
        rows: Texts, or pairs of texts; of equal ones the first is kept.
        held_out: Evaluation and selection rows.
        known: Rows that are learned from anyway.
    """
    banned = {text for row in held_out for text in _stripped(row)}
    seen = {_stripped(row) for row in known}
    kept: list[Row] = []
    dropped = 0
    for row in rows:
        texts = _stripped(row)
        held = banned.issuperset(texts)
        dropped += held
        if not held and texts not in seen:
            kept.append(row)
        seen.add(texts)
    return kept, dropped, len(rows) - len(kept) - dropped


def _stripped(row: Row) -> tuple[str, ...]:
    """Returns the text of a row, or both of a pair, without the blanks around them."""
    assert isinstance(row, str | tuple), type(row)
    return tuple(text.strip() for text in ((row,) if isinstance(row, str) else row))


def packed(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[str]:
    """Returns pieces of at most `max_length` tokens that hold all of the texts, in their order.

    Only a single character of more tokens than that makes a longer piece.

    Args:
        texts: Lines or documents.
        tokenizer: A fast tokenizer of Transformers.
        max_length: Tokens of a piece, special tokens included.
    """
    engine = tokenizer.backend_tokenizer
    engine.no_truncation()
    engine.no_padding()
    most = max_length - engine.num_special_tokens_to_add(False)
    pieces: list[str] = []
    parts: list[str] = []
    used = 0
    for part, tokens in _all_cut(texts, engine, most):
        joint = 1 if used else 0  # some tokenizers have a token for the line feed
        if used + joint + tokens > most:
            pieces += _joined(parts, engine, most)
            parts, used, joint = [], 0, 0
        parts.append(part)
        used += joint + tokens
    return [piece for piece in [*pieces, *_joined(parts, engine, most)] if piece]


def _joined(parts: Sequence[str], engine: Tokenizer, most: int) -> Iterator[str]:
    """Yields some texts as one, without the last ones where it is too long: behind a line feed a text may have more tokens than alone."""
    whole = "\n".join(parts)
    if len(parts) < 2 or len(engine.encode(whole, add_special_tokens=False)) <= most:
        yield whole.strip()
        return
    yield from _joined(parts[:-1], engine, most)
    yield parts[-1]


def _all_cut(texts: Sequence[str], engine: Tokenizer, most: int) -> Iterator[tuple[str, int]]:
    """Yields the pieces of all texts, and how many tokens each of them has."""
    for start in range(0, len(texts), CHUNK):
        chunk = list(texts[start : start + CHUNK])
        for text, encoded in zip(chunk, engine.encode_batch(chunk, add_special_tokens=False), strict=True):
            yield from _cut(text, encoded, engine, most)


def _cut(text: str, encoded: Encoding, engine: Tokenizer, most: int) -> Iterator[tuple[str, int]]:
    """Yields pieces of a text of at most `most` tokens, by themselves, and how many they have; they end with a word where they can.

    What is cut out may have more tokens than it had within the text (a byte-level BPE joins a word with the blank before it), so each
    piece is tokenized again, and shortened until it fits.
    """
    if len(encoded) <= most:
        yield text.strip(), len(encoded)
        return
    position, first = 0, 0
    while first < len(encoded):
        piece, start = _shown(text, position, encoded.offsets[_end(encoded.word_ids, first, most) - 1][1])
        own = engine.encode(piece, add_special_tokens=False)
        while len(own) > most and len(piece) > 1:
            shorter = piece[: own.offsets[_end(own.word_ids, 0, most) - 1][1]].rstrip()
            piece = shorter if len(shorter) < len(piece) else piece[:-1].rstrip()  # tokens of one character end at the same place
            own = engine.encode(piece, add_special_tokens=False)
        if piece:
            yield piece, len(own)
        position = start + len(piece)
        while first < len(encoded) and encoded.offsets[first][1] <= position:
            first += 1


def _shown(text: str, start: int, end: int) -> tuple[str, int]:
    """Returns a part of a text without the blanks around it, and where that begins."""
    part = text[start:end]
    return part.strip(), start + len(part) - len(part.lstrip())


def _end(words: Sequence[int | None], first: int, most: int) -> int:
    """Returns the end of a run of at most `most` tokens from `first` on that ends with a word, unless one word alone is longer."""
    end = min(first + most, len(words))
    back = end
    while back > first and back < len(words) and words[back] == words[back - 1]:
        back -= 1
    return back if back > first else end
