"""Reads rows without labels from a file: what a served model is asked.

    .txt                       every line is a text
    .tsv .csv .jsonl .json .parquet (and .gz)   columns of texts, pairs of texts, images or sounds, by name
    folder or tar archive      images or sounds, CLASS/FILE as in a data set; the classes are not used

Left out: Hub data sets, splits, tables without a header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compress.reading.cells import row_of
from compress.reading.class_folders import KINDS, is_archive, read_files
from foundation.core.errors import InputError
from foundation.data.tables import Table, opened, read_table, suffix, text_lines
from foundation.standalone.preprocess import Row


def read_unlabelled(path: Path, modality: str, columns: Sequence[str], key: str, *, adapted: bool = False) -> list[Row]:
    """Reads all rows of a file.

    Args:
        path: The file.
        modality: `image`, `audio`, or text.
        columns: The column of the text, image or sound, or the two columns of a pair. A file of lines, and files outside of tables,
            have none.
        key: Where the user names columns, for messages.
        adapted: Whether the last column names the adapter of a row.

    Raises:
        InputError: The file cannot be read, a row cannot be read, or there are none.
    """
    rows = list(_rows(path, modality, columns, key, adapted=adapted))
    if not rows:
        raise InputError(f"{path}", "no rows", "at least one is needed")
    return rows


def _rows(path: Path, modality: str, columns: Sequence[str], key: str, *, adapted: bool) -> Iterator[Row]:
    table = Table(path, tuple(columns), key=key)
    if modality in KINDS and (path.is_dir() or is_archive(path)):
        yield from (file.data for file in read_files(path, KINDS[modality], table.limit))
    elif suffix(path) == ".txt" and modality == "text" and len(columns) == 1:
        with opened(table) as stream:
            for number, line in enumerate(text_lines(table, stream), 1):
                yield row_of((line.removesuffix("\r"),), modality, path.parent, table.place(number))
    elif suffix(path) == ".txt":
        raise InputError(
            f"{path}", "a .txt file holds one text a line", remedy=f"give {' and '.join(columns)} as columns of a tsv, csv or jsonl file"
        )
    else:
        for number, cells in read_table(table):
            yield row_of(cells, modality, path.parent, table.place(number), adapted=adapted)
