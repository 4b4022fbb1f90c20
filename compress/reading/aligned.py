"""Line-aligned text files: line n of the first belongs to line n of the second, as train.en and train.de of a parallel corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

from foundation.core.errors import InputError
from foundation.data.compressed import Limit
from foundation.data.tables import Cells, Column, Table, opened, text_lines


def aligned_files(stem: Path, columns: Sequence[Column]) -> list[Path]:
    """Returns the files that are named `stem` and each column, such as train.en and train.de.gz; empty if one is missing."""
    found = []
    for column in columns:
        names = [stem.with_name(f"{stem.name}.{column}{ending}") for ending in ("", ".gz")]
        found += [path for path in names if path.is_file()][:1]
    return found if len(found) == len(columns) else []


def read_aligned(files: Sequence[Path], limit: Limit) -> Iterator[tuple[int, Cells]]:
    """Yields (line counted from 1, that line of each file).

    Raises:
        InputError: A file cannot be read, is not UTF-8, or has fewer lines than another.
    """
    with ExitStack() as stack:
        tables = [Table(path, (), limit=limit) for path in files]
        streams = [text_lines(table, stack.enter_context(opened(table))) for table in tables]
        for number, cells in enumerate(zip_longest(*streams), 1):
            short = next((path for path, cell in zip(files, cells, strict=True) if cell is None), None)
            if short is not None:
                raise InputError(
                    f"{short}", f"{number - 1} lines, fewer than {' and '.join(p.name for p in files if p != short)}", remedy="align them"
                )
            yield number, tuple(cell.removesuffix("\r") for cell in cells)
