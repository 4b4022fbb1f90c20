"""Finds and reads the files, archives and Hub data sets that a recipe's data section refers to.

`read_sources` reads, for every split, the rows, their labels as they appear in the files, and the place of each row, so that later error
messages can give file and line. `tables` and `class_folders` implement the formats.

Not supported: tables that contain several splits; downloads from anywhere but the Hub.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.reading import images
from compress.reading.aligned import aligned_files, read_aligned
from compress.reading.cells import check_file, row_of
from compress.reading.class_folders import ARCHIVES, KINDS, FileKind, LabelledFile, is_archive, read_files
from compress.reading.features import label_names_of, names_in
from compress.reading.sentences import ENDINGS, is_conll, read_conll, sentence_of
from compress.reading.squad import is_json, question_of, read_squad
from foundation.core.errors import InputError, Problem, nearest
from foundation.core.files import local
from foundation.data import tables
from foundation.data.compressed import Limit
from foundation.data.config import Columns, DataConfig, FileConfig
from foundation.data.tables import Cells, Column, Table
from foundation.labels.tasks import TASKS, Task, tasks_with
from foundation.standalone.preprocess import Row

DIGITS = "sklearn:digits"
SPLITS = {"train": "train", "test": "test", "validation": "validation", "dev": "validation", "val": "validation", "valid": "validation"}
HEADED, QUOTED = (".csv", ".tsv", ".txt"), (".tsv", ".txt")
"""Endings of files whose first line names the columns, and of files whose quotes may be part of the text."""
_SPLIT_FILE = re.compile(rf"({'|'.join(SPLITS)})(-\d+-of-\d+)?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
Log = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """The rows that one file contributes to one split."""

    name: str
    """File or data set."""
    rows: list[Row] = field(default_factory=list)
    """The rows."""
    labels: list[Any] = field(default_factory=list)
    """Labels as they appear in the file."""
    places: list[Any] = field(default_factory=list)
    """Line or row number of each row, or its complete place as text."""
    unit: str = "row"
    """Unit of the numbers in `places`: line or row."""
    label_names: tuple[str, ...] = ()
    """Class names by id, as given by the data set."""
    negatives: list[tuple[str, ...]] = field(default_factory=list)
    """Negatives of each triplet, one or several; its first two texts are the row. Else empty."""
    margins: list[tuple[float, ...]] = field(default_factory=list)
    """Margin of each negative of each row, if the train triplets have margins; else empty."""
    documents: list[int] = field(default_factory=list)
    """Number of the document of each row, counted in this file; empty if the format has no documents."""
    scored: bool = True
    """Whether pairs have labels; False for pairs without scores and for triplets."""
    repeat: int = 1
    """How many times a pass of a training takes each row."""

    def place(self, index: int) -> str:
        """Returns file and line of a row, for error messages."""
        place = self.places[index]
        return place if isinstance(place, str) else f"{self.name} {self.unit} {place}"

    def add(self, row: Row, label: Any, place: int | str) -> None:
        """Appends one row."""
        self.rows.append(row)
        self.labels.append(label)
        self.places.append(place)


Sources = dict[str, list[Source]]


def repeats_of(sources: Sequence[Source]) -> NDArray[np.int64] | None:
    """Returns how many times a pass takes each row of a split, int64 `[n]`; None: once."""
    return numbers_of([source.repeat for source in sources for _ in source.rows])


def numbers_of(repeats: Sequence[int]) -> NDArray[np.int64] | None:
    """Returns how many times a pass takes each row, int64 `[n]`; None: once."""
    return np.array(repeats, np.int64) if any(repeat > 1 for repeat in repeats) else None


def read_sources(config: DataConfig, task: Task, log: Log) -> Sources:
    """Finds and reads the data.

    Returns:
        Split name (train, test, validation) -> one `Source` per file, in order. A single table gives only train.

    Raises:
        InputError: Files are missing or unreadable; the error lists all of them, one line each.
    """
    where = local(config.path, "data.path")
    if config.path == DIGITS or where.exists():
        if config.subset is not None:
            log(f"data: subset {config.subset!r} is ignored; only Hub data sets have subsets, and {config.path} is local")
        if config.path == DIGITS:
            check_table_keys(config)
        return _read_digits(task) if config.path == DIGITS else _read_local(where, config, task, log)
    if config.files is not None or not _HUB_ID.fullmatch(config.path) or tables.suffix(where) in tables.TABLES:
        siblings = [child.name for child in where.parent.iterdir()] if where.parent.is_dir() else []
        allowed = f"a file, a folder, a Hub id (owner/name) or {DIGITS} is allowed"
        raise InputError("data.path", f"{config.path}: no such file or folder", f"{allowed}{nearest(where.name, siblings)}")
    check_table_keys(config)
    return _read_hub(config, task, log)


def _read_digits(task: Task) -> Sources:
    _check_task(DIGITS, task, "image")
    return _by_split(images.digits(), DIGITS, KINDS["image"])


def _read_local(where: Path, config: DataConfig, task: Task, log: Log) -> Sources:
    if config.files is not None:
        if not where.is_dir():
            raise InputError("data.path", f"{where}: a file, and data.files is given too", remedy="with data.files give a folder")
        named = {name: getattr(config.files, name) for name in ("train", "test", "validation")}
        found = {
            name: [(local(where / local(entry.file, f"data.files.{name}"), f"data.files.{name}"), entry) for entry in entries]
            for name, entries in named.items()
            if entries
        }
    elif where.is_dir():
        _check_no_arrow(where)
        aligned = _aligned(where, config, task)
        found = {
            name: [(path, FileConfig(file=path.name)) for path in paths] for name, paths in (aligned or _discover(where, task)).items()
        }
        log(f"data: {', '.join(f'{name}: ' + ' + '.join(path.name for path, _ in files) for name, files in found.items())} in {where}")
    elif is_archive(where):
        check_table_keys(config)
        return _read_files(where, config, task)
    else:
        found = {"train": [(where, FileConfig(file=where.name))]}
    check_table_keys(config, (path for files in found.values() for path, _ in files))
    return _read_all(found, config, task)


def _check_no_arrow(folder: Path) -> None:
    """Raises if a folder is what `save_to_disk` of the datasets library writes."""
    splits = (folder / "dataset_dict.json").is_file()
    if splits or ((folder / "state.json").is_file() and any(folder.glob("*.arrow"))):
        what = "a map of data sets" if splits else "a data set"
        how = "for name, split in d.items(): split.to_parquet(f'{name}.parquet')" if splits else "d.to_parquet('train.parquet')"
        raise InputError(
            "data.path",
            f"{folder}: {what} in Arrow files, as save_to_disk of the datasets library writes them",
            "parquet is allowed",
            f"load it there (d = load_from_disk('{folder}')) and write each split ({how}) into a folder of its own",
        )


def _read_all(paths: Mapping[str, Sequence[tuple[Path, FileConfig]]], config: DataConfig, task: Task) -> Sources:
    problems: list[Problem] = []
    sources: Sources = {}
    for split, files in paths.items():
        for path, entry in files:
            try:
                sources.setdefault(split, []).append(replace(_read_file(path, entry, config, task, split), repeat=entry.repeat))
            except InputError as error:
                problems += error.problems
    if problems:
        raise InputError.of(problems)
    return sources


def _aligned(folder: Path, config: DataConfig, task: Task) -> dict[str, list[Path]]:
    """Finds line-aligned text files of each split by name, such as train.en.gz and train.de.gz; returns the stems of their names."""
    if not TASKS[task].encoder_decoder:
        return {}
    columns = config.columns.wanted(task)
    found: dict[str, list[Path]] = {}
    for stem, split in SPLITS.items():
        if aligned_files(folder / stem, columns):
            found.setdefault(split, []).append(folder / stem)
    return found


def _discover(folder: Path, task: Task) -> dict[str, list[Path]]:
    """Finds the files of each split by name: train.tsv.gz, test-00000-of-00002.parquet, and for images and sounds train.tar or train/."""
    facts = TASKS[task]
    found: dict[str, list[Path]] = {}
    endings = (*ENDINGS, *tables.TABLES) if facts.tags else tables.TABLES
    for path in sorted(folder.iterdir()):
        match = _SPLIT_FILE.fullmatch(path.name.split(".")[0])
        files_too = facts.modality in KINDS and (path.is_dir() or is_archive(path))
        if match and (files_too or (path.is_file() and tables.suffix(path) in endings)):
            found.setdefault(SPLITS[match[1]], []).append(path)
    alone = [path for path in sorted(folder.iterdir()) if path.is_file() and tables.suffix(path) in tables.TABLES]
    if not found and not facts.needs_labels and len(alone) == 1:  # its last part becomes the test split
        return {"train": alone}
    problems = [
        Problem(
            f"{folder}",
            f"{', '.join(path.name for path in paths)} all look like the {split} split",
            remedy="name the ones to read in data.files",
        )
        for split, paths in found.items()
        if len(paths) > 1 and not all("-of-" in path.name for path in paths)
    ]
    if "train" not in found:
        allowed = " ".join((*endings, *ARCHIVES) if facts.modality in KINDS else dict.fromkeys(endings))
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
        folders = ", or a folder train/CLASS/FILE" if facts.modality in KINDS else ""
        problems.append(
            Problem(
                f"{folder}",
                f"no train split, only {names}",
                remedy=f"train.* ({allowed}, also .gz){folders} is allowed, or give data.files",
            )
        )
    if problems:
        raise InputError.of(problems)
    return found


def _read_file(path: Path, entry: FileConfig, config: DataConfig, task: Task, split: str) -> Source:
    facts = TASKS[task]
    given = entry.columns.over(config.columns)
    columns = given.wanted(task)
    if facts.encoder_decoder and (aligned := aligned_files(path, columns)):
        return _read_rows(str(path), read_aligned(aligned, _limit(config)), task, path.parent, "line")
    if not path.exists():
        siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f"data.files.{split}", f"{path}: no such file{nearest(path.name, siblings)}")
    if path.is_dir() or is_archive(path):
        return _one_split(_read_files(path, config, task), path, split)
    if not facts.needs_labels and tables.suffix(path) == ".txt":
        return Source(str(path), [tables.read_document(path, _limit(config))], [None], [1])
    table = _table(path, columns, entry, config)
    if facts.needs_pairs:
        named = scored_or_not(given, task, split, partial(tables.column_names, table))
        return _read_texts(str(path), tables.read_table(replace(table, columns=tuple(named.values()))), named, table.unit)
    if facts.finds_spans and is_json(path):
        return _read_rows(str(path), read_squad(table), task, path.parent, "question")
    if facts.tags and is_conll(path):
        return _read_rows(str(path), read_conll(table), task, path.parent, "line")
    adapted = given.adapter is not None
    if split == "train" and not config.train_labels:
        cells = tables.read_table(replace(table, columns=columns[:-1]))
        return _read_rows(str(path), cells, task, path.parent, table.unit, labelled=False, adapted=adapted)
    names = label_names_of(table, columns[-1]) if facts.answer.classifies else ()
    return _read_rows(str(path), tables.read_table(table), task, path.parent, table.unit, names, adapted=adapted)


def _table(path: Path, columns: tuple[Column, ...], entry: FileConfig, config: DataConfig) -> Table:
    """Returns how a file is read. Its own settings come first, then `data.header` and `data.quoting`, for the formats that have them."""
    ending = tables.suffix(path)
    header = entry.header if entry.header is not None else config.header or ending not in HEADED
    quoting = entry.quoting if entry.quoting is not None or ending not in QUOTED else config.quoting
    remedy = "set data.quoting: minimal to read such fields without their quotes, or data.quoting: none if the quotes are part of the text"
    return Table(path, columns, header, _limit(config), quoting=quoting, remedy=remedy, header_key="data.header")


def check_table_keys(config: DataConfig, files: Iterable[Path] = ()) -> None:
    """Raises if `data.header` or `data.quoting` is given and no file reads it."""
    endings = {tables.suffix(path) for path in files}
    given = (("header: false", not config.header, HEADED), (f"quoting: {config.quoting}", config.quoting is not None, QUOTED))
    problems = [
        Problem(f"data.{key}", f"given, but {config.path} has no {' and no '.join(read)} file", remedy="leave it out")
        for key, set_, read in given
        if set_ and not endings & set(read)
    ]
    if problems:
        raise InputError.of(problems)


def scored_or_not(columns: Columns, task: Task, split: str, available: Callable[[], Sequence[str]]) -> dict[str, Column]:
    """Returns the columns of pairs by their keys; without the scores if the recipe does not name them and the data have none.

    Args:
        columns: Columns in the recipe.
        task: The task.
        split: The split; margins are read only for training.
        available: Returns the names of the columns of the data.

    Raises:
        InputError: Margins are given without negatives.
    """
    named = _without_margins(columns.named(task), split)
    if columns.label is None and "label" in named and named["label"] not in available():
        del named["label"]
    return named


def _without_margins(named: Mapping[str, Column], split: str) -> dict[str, Column]:
    """Returns columns by their keys, with margins only for the train split; raises if margins come without negatives."""
    margins = [key for key in named if key.startswith("margin")]
    if split != "train":
        return {key: column for key, column in named.items() if key not in margins}
    if margins and "negative" not in named:
        given = f"{named[margins[0]]!r} given without data.columns.negative"
        raise InputError("data.columns.margin", given, "a margin belongs to a negative", "give both, or leave it out")
    return dict(named)


def _limit(config: DataConfig) -> Limit:
    return Limit(config.max_expanded_gb, "data.max_expanded_gb")


def _one_split(sources: Sources, path: Path, split: str) -> Source:
    """Returns the only split of an archive, or the requested one if there are several."""
    if len(sources) == 1:
        return next(iter(sources.values()))[0]
    if split not in sources:
        raise InputError(
            f"data.files.{split}",
            f"{path}: has {', '.join(sources)} but no {split}",
            remedy=f"give an archive with one split, or with {split}",
        )
    return sources[split][0]


def _read_files(path: Path, config: DataConfig, task: Task) -> Sources:
    """Reads the files of a folder or archive that are sorted by class."""
    kind = KINDS[_check_task(str(path), task)]
    return _by_split(read_files(path, kind, _limit(config)), str(path), kind)


def _by_split(files: Iterable[LabelledFile], name: str, kind: FileKind) -> Sources:
    sources: Sources = {}
    for file in files:
        split = SPLITS.get(file.split or "train")
        if split is None:
            raise InputError(file.place, f"{file.split!r} is not a split", f"allowed above the class folders: {', '.join(SPLITS)}")
        check_file(file.data, kind, file.place)
        sources.setdefault(split, [Source(name)])[0].add(file.data, file.label, file.place)
    if not sources:
        raise InputError(name, f"contains no {kind.one}s", f"SPLIT/CLASS/FILE with {kind.named} is allowed")
    return sources


def _read_hub(config: DataConfig, task: Task, log: Log) -> Sources:
    facts = TASKS[task]
    named = config.columns.named(task)
    columns = list(named.values())
    positions = [column for column in columns if isinstance(column, int)]
    if positions:
        raise InputError("data.columns", f"{positions[0]} given", "Hub data sets have named columns", "give names")
    optional = not config.train_labels or (facts.needs_pairs and config.columns.label is None)
    unnamed = [str(named["label"])] if optional and "label" in named else []
    elsewhere = _without_margins(named, "test")
    margins = [str(column) for key, column in _without_margins(named, "train").items() if key not in elsewhere]
    found = tables.read_hub(config.path, config.subset, [str(column) for column in columns], log, [*unnamed, *margins])
    sources: Sources = {}
    for name, (rows, features) in found.items():
        if name not in SPLITS:
            log(f"data: split {name!r} of {config.path} is not used; only {', '.join(SPLITS)} are")
            continue
        if facts.needs_pairs:
            absent = [column for column in margins if column not in features and SPLITS[name] == "train"]
            if absent:
                raise InputError.of([tables.missing_column(f"data.path {config.path} split {name}", absent[0], features)])
            read = {key: column for key, column in named.items() if column in features}
            pairs = _read_texts(f"{config.path} split {name}", enumerate(rows, 1), read, "row")
            sources.setdefault(SPLITS[name], []).append(pairs)
            continue
        where, adapted = f"{config.path} split {name}", config.columns.adapter is not None
        if SPLITS[name] == "train" and not config.train_labels:
            texts = enumerate((cells[: len(columns) - 1] for cells in rows), 1)
            sources.setdefault("train", []).append(_read_rows(where, texts, task, Path(), "row", labelled=False, adapted=adapted))
            continue
        if columns[-1] not in features:
            raise InputError.of([tables.missing_column(f"data.path {where}", columns[-1], features)])
        names = names_in(features.to_dict()[columns[-1]], where) if facts.answer.classifies else ()
        source = _read_rows(where, enumerate(rows, 1), task, Path(), "row", names, adapted=adapted)
        sources.setdefault(SPLITS[name], []).append(source)
    if "train" not in sources:
        raise InputError("data.path", f"{config.path}: no train split", f"it has {', '.join(found)}")
    return sources


def _read_rows(
    name: str,
    cells: Iterator[tuple[int, Cells]],
    task: Task,
    folder: Path,
    unit: str,
    label_names: tuple[str, ...] = (),
    *,
    labelled: bool = True,
    adapted: bool = False,
) -> Source:
    """Converts the cells of a table to rows of the task; `adapted`: the cell before the label names the adapter of the row."""
    facts = TASKS[task]
    source = Source(name, unit=unit, label_names=label_names)
    for number, found in cells:
        if facts.tags:
            words, tags, *document = found
            source.documents.extend(document)
            source.add(*sentence_of(words, tags, label_names, f"{name} {unit} {number}"), number)
            continue
        if facts.finds_spans:
            source.add(*question_of(found, f"{name} {unit} {number}"), number)
            continue
        contents, label = (found[:-1], found[-1]) if facts.needs_labels and labelled else (found, None)
        source.add(row_of(contents, facts.modality, folder, f"{name} {unit} {number}", adapted=adapted), label, number)
    if not source.rows:
        raise InputError(name, "no rows", "at least one is needed")
    return source


def _read_texts(name: str, cells: Iterator[tuple[int, Cells]], columns: Mapping[str, Column], unit: str) -> Source:
    """Converts the cells of a table to pairs of texts, with their scores, or negatives and their margins, where there are such columns."""
    source = Source(name, unit=unit, scored="label" in columns)
    for number, found in cells:
        cell, place = dict(zip(columns, found, strict=True)), f"{name} {unit} {number}"
        source.add(row_of((cell["text"], cell["text_pair"]), "text", Path(), place), cell.get("label"), number)
        if "negative" in cell:
            negatives, margins = ([cell[key] for key in columns if key.startswith(name)] for name in ("negative", "margin"))
            texts = [row_of((text,), "text", Path(), place) for text in _listed(negatives, place)]
            source.negatives.append(tuple(dict.fromkeys(map(str, texts))))
            if margins:
                source.margins.append(_margins(margins, texts, place))
    if not source.rows:
        raise InputError(name, "no rows", "at least one is needed")
    return source


def _listed(cells: Sequence[object], place: str) -> list[object]:
    """Returns what the columns of negatives hold; a cell is a text or a list of texts, and of several columns one may be empty."""
    found: list[object] = []
    for cell in cells:
        if isinstance(cell, list):
            found += cell
        elif len(cells) == 1 or cell not in (None, ""):
            found.append(cell)
    if not found:
        raise InputError(place, "no negative given", "at least one text is needed", "add one, or remove the row")
    return found


def _margins(cells: Sequence[object], texts: Sequence[Row], place: str) -> tuple[float, ...]:
    """Returns the margins of the negatives of a row; equal texts take the margin of the first one."""
    given = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell]) if len(cells) == 1 or one not in (None, "")]
    if len(given) != len(texts):
        raise InputError(place, f"{len(given)} margin(s) given for {len(texts)} negative(s)", "one for each negative is needed")
    found: dict[Row, float] = {}
    for text, value in zip(texts, given, strict=True):
        number = math.nan if isinstance(value, bool) else _number(value)
        if not math.isfinite(number):
            raise InputError(place, f"margin {value!a:.60} given", "a finite number is allowed")
        found.setdefault(text, number)
    return tuple(found.values())


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _check_task(name: str, task: Task, modality: str | None = None) -> str:
    """Returns the modality of a task; raises an `InputError` if its rows are not files, or of another modality."""
    facts = TASKS[task]
    given = facts.modality
    if facts.captioned:
        raise InputError(
            "data.path", f"{name}: images of classes, and images of {task} have captions", "a table with both columns is allowed"
        )
    if given not in KINDS or modality not in (None, given):
        allowed = tasks_with(lambda row: row.modality in (KINDS if modality is None else (modality,)) and not row.captioned)
        what = "images or sounds" if modality is None else f"{KINDS[modality].one}s"
        raise InputError("data.path", f"{name}: {what}, and model.task is {task}", f"{allowed} is allowed")
    return given
