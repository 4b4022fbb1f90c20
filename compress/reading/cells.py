"""Cells of tables as rows: texts, pairs of texts, encoded images and sounds; texts may name their adapter."""

from __future__ import annotations

from pathlib import Path

from compress.reading.class_folders import KINDS, FileKind
from foundation.core.errors import InputError
from foundation.core.files import read_plain
from foundation.core.shown import is_unicode, reason, shown
from foundation.data.tables import Cells
from foundation.models.adapter_names import check_name
from foundation.standalone.adapted import with_adapter
from foundation.standalone.preprocess import Row


def row_of(contents: Cells, modality: str, folder: Path, place: str, *, adapted: bool = False) -> Row:
    """Turns the cells of a table into a row: a text, a pair of texts, or an encoded image or sound.

    Args:
        contents: One text, two, or one file.
        modality: `image`, `audio`, or text.
        folder: Where relative paths of files begin.
        place: File and line, for the message.
        adapted: Whether the last cell names the adapter of the row; contents are texts then.

    Raises:
        InputError: A cell is not text, not a file that can be decoded, or not the name of an adapter.
    """
    if modality in KINDS:
        return _file(contents[0], KINDS[modality], folder, place)
    if adapted:
        row = row_of(contents[:-1], modality, folder, place)
        return with_adapter(row, check_name(contents[-1], place))
    for text in contents:
        if not isinstance(text, str) or not (text.isascii() or is_unicode(text)):
            raise InputError(place, f"{text!a:.60} given as text", "valid Unicode text is allowed")
    return contents[0] if len(contents) == 1 else (contents[0], contents[1])


def _file(cell: object, kind: FileKind, folder: Path, place: str) -> bytes:
    """Returns the encoded file of a cell: bytes, the {bytes, path} dict of the datasets library, or a path relative to the table."""
    data = cell
    if isinstance(cell, dict):
        encoded = cell.get("bytes")
        data = encoded if encoded else cell.get("path")
    if isinstance(data, str):
        try:
            data = read_plain(folder / data, kind.most_bytes, f"{place}: {kind.one} {shown(data, 80)}")
        except InputError:
            raise
        except (OSError, ValueError) as error:
            named = f"{kind.one} {shown(data, 80)} cannot be read ({reason(error)})"
            raise InputError(place, named, f"a path relative to {folder} is allowed") from error
    if not isinstance(data, bytes):
        raise InputError(place, f"{type(data).__name__} given as {kind.one}", "encoded bytes or a path are allowed")
    check_file(data, kind, place)
    return data


def check_file(data: bytes, kind: FileKind, place: str) -> None:
    """Raises an `InputError` if an image or sound cannot be decoded."""
    try:
        kind.check(data)
    except ValueError as error:  # BadRow and BadSound
        raise InputError(place, f"{error}") from error
