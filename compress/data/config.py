"""The data section of a recipe: where the rows are, and which columns hold what."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from compress.core.config import Config
from compress.core.tasks import TASKS, Task
from compress.data.tables import Column

OPTIONAL = ("text_pair",)
"""Columns that are read only where they are given."""

ColumnName = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0, strict=True)]


class Columns(Config):
    """Which columns hold what: names, or positions counted from 0 where a file has no header."""

    text: ColumnName | None = None
    """The text, or the first of a pair; `text` where absent."""
    text_pair: ColumnName | None = None
    """The second text of a pair; absent for single texts."""
    image: ColumnName | None = None
    """The image: encoded bytes, or a path beside the table; `image` where absent. Folders and archives of images have no columns."""
    label: ColumnName | None = None
    """The label; `label` where absent. A split whose labels are all -1 counts as unlabelled. None for text-generation."""

    def over(self, base: Columns) -> Columns:
        """Returns these columns, completed by those of `base`."""
        return base.model_copy(update=self.model_dump(exclude_none=True))

    def wanted(self, task: Task) -> tuple[Column, ...]:
        """Returns the columns that a task reads, the label last where it has one; a column that is not given has the name of its key."""
        given = {name: getattr(self, name) for name in TASKS[task].columns}
        return tuple(name if column is None else column for name, column in given.items() if column is not None or name not in OPTIONAL)


class FileConfig(Config):
    """One file of a split that differs from the others."""

    file: Annotated[str, Field(min_length=1)]
    """The file, relative to `data.path`."""
    header: bool = True
    """Whether its first line names the columns (tsv and csv)."""
    columns: Columns = Columns()
    """Its columns; those not given are the ones of `data.columns`."""


def _as_files(value: Any) -> Any:
    entries = value if isinstance(value, list | tuple) else [value]
    return [{"file": entry} if isinstance(entry, str) else entry for entry in entries]


Files = Annotated[tuple[FileConfig, ...], BeforeValidator(_as_files)]


class FilesConfig(Config):
    """The files of each split; a file, or a list of files that are read one after the other."""

    train: Annotated[Files, Field(min_length=1)]
    """Rows to learn from."""
    test: Files = ()
    """Rows for the final figures."""
    validation: Files = ()
    """Rows for choices; for the final figures too where there is no labelled test split."""


class DataConfig(Config):
    """Training and evaluation data."""

    path: Annotated[str, Field(min_length=1)]
    """A Hub id, a folder or a file of csv tsv json jsonl parquet (.gz too), for text-generation txt as well, a folder or tar archive of
    images, or `sklearn:digits`."""
    subset: str | None = None
    """Configuration of a Hub data set; ignored for local data."""
    columns: Columns = Columns()
    """Which columns hold text, pair, image and label."""
    files: FilesConfig | None = None
    """The files of each split, relative to `path`; found by their names (train.*, test.*, dev.* or validation.*) where absent. Text for
    text-generation that comes as one file alone gives its last tenth as the test split."""
    max_length: Annotated[int, Field(ge=8, le=65536)] = 128
    """Tokens kept of a row, special tokens included; longer rows are truncated. For text-generation the tokens of a block, which the text
    is cut into. Ignored for images."""
