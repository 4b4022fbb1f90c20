"""Rows for the certificate of a cascade (`data.certify`): read like a split, with or without labels, and disjoint from all other rows.

A certificate is about rows that took part in nothing: a row that trained a tier, chose a threshold or is reported on says less of new rows
than it seems to. So rows whose content is a train, selection or evaluation row end the run, or are left out (`data.certify.shared`). What
trained the user's own model before the run is not known here.

Read are tables, CoNLL files, and folders and archives of images and sounds. Of sentences whose words have tags only the words are read.
Where answers are vectors each text of a line is a row. Numbers that label rows are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import replace
from pathlib import Path

import numpy as np

from compress.reading import label_sets, labels
from compress.reading.cells import check_file, row_of
from compress.reading.class_folders import KINDS, is_archive, read_files
from compress.reading.sentences import is_conll, read_conll, sentence_of
from compress.reading.sources import HEADED, QUOTED, Source
from foundation.core.errors import InputError, nearest
from foundation.core.files import local
from foundation.core.shown import shown
from foundation.data.compressed import Limit
from foundation.data.config import DataConfig, FileConfig
from foundation.data.splits import CertifyRows, Data, input_key
from foundation.data.tables import Table, read_table, suffix
from foundation.labels.form import Labels
from foundation.labels.tags import OUTSIDE
from foundation.labels.tasks import TASKS, Task, tasks_with
from foundation.standalone.preprocess import Row

KEY = "data.certify"
LABELLED = ("class", "set")
"""Forms of answers whose labels are read here."""


def with_certify(data: Data, config: DataConfig, task: Task, log: Callable[[str], None], *, numbered: bool) -> Data:
    """Returns the data with the rows of `data.certify`; as they are where the recipe has none.

    Args:
        data: All splits.
        config: The data section.
        task: The task.
        log: Receives how many rows there are.
        numbered: Whether the model gives the names of the classes, so that their numbers are labels too.

    Raises:
        InputError: The files cannot be read, or hold train, selection or evaluation rows.
    """
    if config.certify is None:
        return data
    if TASKS[task].confidence is None:
        able = tasks_with(lambda row: row.confidence is not None)
        raise InputError(KEY, f"given for {task}", f"{able} is allowed", "leave it out")
    sources = [_read(entry, config, task) for entry in config.certify.files]
    labelled = all(source.labels for source in sources) and TASKS[task].confidence in LABELLED
    rows = [row for source in sources for row in source.rows]
    known = _known(data)
    new = [number for number, row in enumerate(rows) if input_key(row) not in known]
    if config.certify.shared == "refuse" and len(new) < len(rows):
        _refuse(rows, new)
    if not new:
        raise InputError(f"{KEY}.files", f"all {len(rows)} rows are train, selection or evaluation rows too", remedy="give other rows")
    found = _labels(sources, config, task, data.labels, numbered=numbered) if labelled else None
    kept = CertifyRows([rows[number] for number in new], None if found is None else found[np.array(new, np.int64)], len(rows) - len(new))
    left = f"; {kept.shared} others are train, selection or evaluation rows too, and are left out" if kept.shared else ""
    log(f"data: {len(kept)} {'labelled ' if labelled else ''}rows for the certificate{left}")
    return replace(data, certify=kept)


def _known(data: Data) -> set[bytes]:
    """Returns the input keys of all rows that take part in the run."""
    splits = (data.train, data.selection, data.evaluation, *(() if data.hidden is None else (data.hidden,)))
    return {key for split in splits for key in split.input_keys}


def _refuse(rows: list[Row], new: list[int]) -> None:
    fresh = set(new)
    first = next(number for number in range(len(rows)) if number not in fresh)
    example = f", the first is {shown(rows[first], 60)}" if isinstance(rows[first], str | tuple) else f", the first is row {first + 1}"
    raise InputError(
        f"{KEY}.files",
        f"{len(rows) - len(new)} of {len(rows)} rows are train, selection or evaluation rows too{example}",
        "rows of a certificate take part in nothing else",
        "remove them, or give data.certify.shared: drop",
    )


def _read(entry: FileConfig, config: DataConfig, task: Task) -> Source:
    """Reads a file; its source has labels where they are read."""
    facts, limit = TASKS[task], Limit(config.max_expanded_gb, "data.max_expanded_gb")
    where = local(config.path, "data.path")
    path = local(where / local(entry.file, f"{KEY}.files"), f"{KEY}.files")
    if not where.is_dir() and not Path(entry.file).is_absolute():
        raise InputError(f"{KEY}.files", f"{entry.file} given, and data.path {config.path} is no folder", remedy="give the whole path")
    if not path.exists():
        siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"{KEY}.files", f"{path}: no such file{nearest(path.name, siblings)}")
    if facts.modality in KINDS and (path.is_dir() or is_archive(path)):
        kind, source = KINDS[facts.modality], Source(str(path))
        for file in read_files(path, kind, limit):
            check_file(file.data, kind, file.place)
            source.add(file.data, file.label, file.place)
    elif facts.tags:
        source = _sentences(path, entry, config, limit)
    elif facts.embeds:
        source = _texts(path, entry, config, limit)
    else:
        columns = entry.columns.over(config.columns).named(task)
        if entry.columns.label is None:
            columns.pop("label")
        header = entry.header if entry.header is not None else config.header or suffix(path) not in HEADED
        quoting = entry.quoting if entry.quoting is not None or suffix(path) not in QUOTED else config.quoting
        table = Table(path, tuple(columns.values()), header, limit, key=f"{KEY}.files.columns", quoting=quoting)
        source = Source(str(path), unit=table.unit)
        texts = len([name for name in columns if name != "label"])
        for number, cells in read_table(table):
            source.rows.append(row_of(cells[:texts], facts.modality, path.parent, table.place(number)))
            source.labels.extend(cells[texts:])
            source.places.append(number)
    if not source.rows:
        raise InputError(str(path), "no rows", "at least one is needed")
    return source


def _sentences(path: Path, entry: FileConfig, config: DataConfig, limit: Limit) -> Source:
    """Reads the words of the sentences of a table or a CoNLL file; sentences without a word are left out."""
    column = entry.columns.over(config.columns).named("token-classification")["tokens"]
    header = entry.header if entry.header is not None else config.header or suffix(path) not in HEADED
    table = Table(path, (column,), header, limit, key=f"{KEY}.files.columns")
    source = Source(str(path), unit="line" if is_conll(path) else table.unit)
    for number, (words, *_) in read_conll(table) if is_conll(path) else read_table(table):
        tags = [OUTSIDE] * len(words) if isinstance(words, Sized) else []
        text, tagged = sentence_of(words, tags, (), table.place(number))
        if tagged.words:
            source.add(text, None, number)
    return source


def _texts(path: Path, entry: FileConfig, config: DataConfig, limit: Limit) -> Source:
    """Reads the texts of a table, each a row of its own; the columns of the file are named for it, or for all files of the data."""
    named = config.columns.named("sentence-embedding") if entry.columns.text is None else entry.columns.model_dump(exclude_none=True)
    columns = tuple(named[name] for name in ("text", "text_pair") if name in named)
    header = entry.header if entry.header is not None else config.header or suffix(path) not in HEADED
    quoting = entry.quoting if entry.quoting is not None or suffix(path) not in QUOTED else config.quoting
    table = Table(path, columns, header, limit, key=f"{KEY}.files.columns", quoting=quoting)
    source = Source(str(path), unit=table.unit)
    for number, cells in read_table(table):
        for cell in cells:
            source.add(row_of((cell,), "text", path.parent, table.place(number)), None, number)
    return source


def _labels(sources: list[Source], config: DataConfig, task: Task, names: tuple[str, ...], *, numbered: bool) -> Labels:
    """Returns the labels of all rows, in the form of the task."""
    answer = TASKS[task].answer
    if TASKS[task].multi_label:
        vectors = label_sets.are_vectors(sources, len(names), config.multi_hot)
        return answer.form(label_sets.set_ids(sources, names, "the data", vectors=vectors, numbered=numbered))
    return answer.form(labels.class_ids(sources, names, "the data", numbered=numbered))
