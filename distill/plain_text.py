"""Plain text: unlabelled rows as extra training data, or a corpus for task-agnostic distillation.

A tsv, csv, json, jsonl or parquet file gives one row per record, a text file (.txt) one row per line, a folder the rows of all such files
in name order, a Hub data set the rows of one split. Files may be compressed (.gz). Blank rows are skipped. `packed` splits a corpus into
pieces of at most as many tokens as a row may have:

    lines -> tokens -> long lines are split at word boundaries, consecutive short lines are joined by a line feed;
    each piece is tokenized again to verify that it fits

Rows equal to an evaluation or selection row are never trained on: `new_rows` removes them. Surrounding whitespace is ignored. If those rows
are pairs, neither text of a pair is trained on, alone or paired with another of these texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from tokenizers import Encoding, Tokenizer

from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.data import tables
from foundation.data.config import ColumnName
from foundation.data.splits import content_key
from foundation.data.tables import Quoting
from foundation.standalone.preprocess import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 1024


class PlainText(Config):
    """Text without labels."""

    path: Annotated[str, Field(min_length=1)]
    """A csv, tsv, txt (one row per line), json, jsonl or parquet file (also .gz), a folder of such files, or a Hub id (owner/name)."""
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split of a Hub data set."""
    text: ColumnName = "text"
    """The column of the text, or of the first text of a pair; its position if the file has no header."""
    text_pair: ColumnName | None = None
    """The column of the second text of a pair; required if the rows of the data are pairs."""
    header: bool = True
    """Whether the first line of a tsv or csv names the columns."""
    quoting: Quoting | None = None
    """Quotes in tsv files: minimal, if fields that contain tabs, line ends or quotes stand in quotes, as pandas and csv writers write them;
    none, if quotes are part of the text. Default: none, and files that look like minimal are refused."""


def read_plain(config: PlainText, key: str, log: Callable[[str], None] = lambda message: None) -> list[Row]:
    """Returns the rows: texts, or pairs of texts where a second column is given.

    Args:
        config: What to read.
        key: Its key path in the recipe, for messages.
        log: Receives a line if something may be downloaded.

    Raises:
        InputError: The source cannot be read, holds values that are not text, or no text at all.
    """
    where = local(config.path, f"{key}.path")
    if where.is_dir():
        files = [path for path in sorted(where.iterdir()) if path.is_file() and tables.suffix(path) in tables.TABLES]
    else:
        files = [where] if where.exists() else []
    if not files and (where.exists() or config.path.count("/") != 1 or config.path.startswith((".", "/", "~"))):
        raise InputError(
            f"{key}.path", f"{config.path} given", remedy=f"give a file ({' '.join(tables.TABLES)}), a folder of such files or a Hub id"
        )
    try:
        if not files:
            log(f"{key}: reading {config.path} from the Hub or the local cache")
        rows = list(_read(config, tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)))
    except InputError as error:
        raise InputError.of(problem.renamed("data.path", f"{key}.path") for problem in error.problems) from error
    if not rows:
        raise InputError(f"{key}.path", f"{config.path} contains no text", "at least one row is needed")
    return rows


@lru_cache(maxsize=2)
def _read(config: PlainText, files: tuple[tuple[str, int, int], ...]) -> tuple[Row, ...]:
    """Reads all files, or the Hub if there are none; cached in memory until a file changes."""
    if files:
        return tuple(row for path, _, _ in files for row in _rows_of(Path(path), config))
    columns = _columns(config)
    positions = [column for column in columns if isinstance(column, int)]
    if positions:
        raise InputError(f"data.path {config.path}", f"column {positions[0]} given", remedy="give the name of a column for a Hub data set")
    found = tables.read_hub(config.path, config.subset, [str(column) for column in columns], lambda message: None)
    if config.split not in found:
        raise InputError(f"data.path {config.path}", f"no split {config.split!r}", f"available: {', '.join(found)}")
    return tuple(_texts(enumerate(found[config.split][0], 1), f"{config.path} split {config.split} row"))


def _rows_of(path: Path, config: PlainText) -> Iterator[Row]:
    if tables.suffix(path) == ".txt":
        return _texts(((number, (line,)) for number, line in enumerate(tables.read_document(path).split("\n"), 1)), f"{path} line")
    quoting = config.quoting if tables.suffix(path) == ".tsv" else None  # the folder may hold files of other formats
    remedy = "give quoting: minimal, or quoting: none if the quotes are part of the text"
    table = tables.Table(path, _columns(config), config.header, quoting=quoting, remedy=remedy, key="text", header_key="header")
    return _texts(tables.read_table(table), f"{path} {table.unit}")


def _columns(config: PlainText) -> tuple[ColumnName, ...]:
    return (config.text,) if config.text_pair is None else (config.text, config.text_pair)


def _texts(cells: Iterable[tuple[int, tables.Cells]], where: str) -> Iterator[Row]:
    for number, found in cells:
        for text in found:
            if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(f"{where} {number}", f"{text!a:.60} given as text", remedy="give valid Unicode text")
        texts = [text.strip() for text in found]
        if any(texts):
            yield texts[0] if len(texts) == 1 else (texts[0], texts[1])


def digest(rows: Sequence[Row]) -> str:
    """Returns the sha256 (hex) of the rows' contents, in order."""
    return hashlib.sha256(b"".join(content_key(row) for row in rows)).hexdigest()


def new_rows(rows: Sequence[Row], held_out: Iterable[Row], known: Iterable[Row]) -> tuple[list[Row], int, int]:
    """Returns the new rows, the number of rows made up only of held-out texts, and the number of duplicates.

    Args:
        rows: Texts, or pairs of texts; the first of equal rows is kept.
        held_out: Evaluation and selection rows.
        known: Rows that are in the training data already.
    """
    excluded = {text for row in held_out for text in _stripped(row)}
    seen = {_stripped(row) for row in known}
    kept: list[Row] = []
    dropped = 0
    for row in rows:
        texts = _stripped(row)
        held = excluded.issuperset(texts)
        dropped += held
        if not held and texts not in seen:
            kept.append(row)
        seen.add(texts)
    return kept, dropped, len(rows) - len(kept) - dropped


def _stripped(row: Row) -> tuple[str, ...]:
    """Returns the text of a row, or both texts of a pair, without surrounding whitespace."""
    assert isinstance(row, str | tuple), type(row)
    return tuple(text.strip() for text in ((row,) if isinstance(row, str) else row))


def packed(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, max_length: int) -> list[str]:
    """Returns pieces of at most `max_length` tokens that together hold all texts, in order.

    A piece is longer only if a single character has more tokens than that.

    Args:
        texts: Lines or documents.
        tokenizer: A fast tokenizer of Transformers.
        max_length: Tokens per piece, special tokens included.
    """
    engine = tokenizer.backend_tokenizer
    engine.no_truncation()
    engine.no_padding()
    most = max_length - engine.num_special_tokens_to_add(False)
    pieces: list[str] = []
    parts: list[str] = []
    used = 0
    for part, tokens in _all_cut(texts, engine, most):
        joint = 1 if used else 0  # some tokenizers have a line feed token
        if used + joint + tokens > most:
            pieces += _joined(parts, engine, most)
            parts, used, joint = [], 0, 0
        parts.append(part)
        used += joint + tokens
    return [piece for piece in [*pieces, *_joined(parts, engine, most)] if piece]


def _joined(parts: Sequence[str], engine: Tokenizer, most: int) -> Iterator[str]:
    """Yields the texts joined by line feeds, or split again if too long: a text may have more tokens after a line feed than alone."""
    whole = "\n".join(parts)
    if len(parts) < 2 or len(engine.encode(whole, add_special_tokens=False)) <= most:
        yield whole.strip()
        return
    yield from _joined(parts[:-1], engine, most)
    yield parts[-1]


def _all_cut(texts: Sequence[str], engine: Tokenizer, most: int) -> Iterator[tuple[str, int]]:
    """Yields the pieces of all texts with their numbers of tokens."""
    for start in range(0, len(texts), CHUNK):
        chunk = list(texts[start : start + CHUNK])
        for text, encoded in zip(chunk, engine.encode_batch(chunk, add_special_tokens=False), strict=True):
            yield from _cut(text, encoded, engine, most)


def _cut(text: str, encoded: Encoding, engine: Tokenizer, most: int) -> Iterator[tuple[str, int]]:
    """Yields pieces of a text of at most `most` tokens with their numbers of tokens; a piece ends at a word boundary if possible.

    A piece may have more tokens than the same span had within the text (byte-level BPE joins a word with the space before it), so each
    piece is tokenized again and shortened until it fits.
    """
    if len(encoded) <= most:
        yield text.strip(), len(encoded)
        return
    position, first = 0, 0
    while first < len(encoded):
        piece, start = _stripped_span(text, position, encoded.offsets[_end(encoded.word_ids, first, most) - 1][1])
        own = engine.encode(piece, add_special_tokens=False)
        while len(own) > most and len(piece) > 1:
            shorter = piece[: own.offsets[_end(own.word_ids, 0, most) - 1][1]].rstrip()
            piece = shorter if len(shorter) < len(piece) else piece[:-1].rstrip()  # the tokens of one character share their end offset
            own = engine.encode(piece, add_special_tokens=False)
        if piece:
            yield piece, len(own)
        position = start + len(piece)
        while first < len(encoded) and encoded.offsets[first][1] <= position:
            first += 1


def _stripped_span(text: str, start: int, end: int) -> tuple[str, int]:
    """Returns a span of a text without surrounding whitespace, and its start offset."""
    part = text[start:end]
    return part.strip(), start + len(part) - len(part.lstrip())


def _end(words: Sequence[int | None], first: int, most: int) -> int:
    """Returns the end of a run of at most `most` tokens from `first` that ends at a word boundary, unless a single word is longer."""
    end = min(first + most, len(words))
    back = end
    while back > first and back < len(words) and words[back] == words[back - 1]:
        back -= 1
    return back if back > first else end
