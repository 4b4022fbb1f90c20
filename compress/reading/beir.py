"""Reads queries, documents and judgements in the layout of BEIR (https://arxiv.org/abs/2104.08663).

    FOLDER/corpus.jsonl         _id, text, and title if there is one: a document is its title, a space and its text
    FOLDER/queries.jsonl        _id, text
    FOLDER/qrels/SPLIT.tsv      query-id, corpus-id, score below a header line; SPLIT: train, dev, test. Score 0: judged as not relevant;
                                below 0, which TREC uses for junk, counts as 0, as trec_eval counts it

Each file may end in .gz. Further columns are not read.

Left out: data sets of the Hub; BEIR's habit of dropping a document that has the id of the query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.reading.cells import row_of
from foundation.core.errors import InputError, Problem
from foundation.core.files import local
from foundation.core.shown import shown
from foundation.data.compressed import Limit
from foundation.data.config import Columns, DataConfig, Prompts
from foundation.data.tables import Table, read_table
from foundation.labels.relevance import MOST_TEXTS
from foundation.labels.tasks import Task

FIRST = 50
"""Candidates of a query that are read, where the recipe does not say."""
CORPUS, QUERIES, QRELS, CANDIDATES = "corpus.jsonl", "queries.jsonl", "qrels", "candidates"
SPLITS = ("train", "dev", "test")
LARGEST_GRADE = 1000
Judgements = Mapping[tuple[str, str], int]
"""Ids of query and document -> grade."""


@dataclass(frozen=True)
class Collection:
    """The contents of a folder."""

    folder: Path
    """Where."""
    queries: Mapping[str, str]
    """Text by id, with the prefix of queries."""
    documents: Mapping[str, str]
    """Title and text by id, with the prefix of documents."""
    judgements: Mapping[str, Judgements]
    """Judgements by split; test or dev is there."""


def read_collection(config: DataConfig, task: Task) -> Collection:
    """Reads a folder.

    Args:
        config: The data section.
        task: The task, for messages.

    Raises:
        InputError: A file is missing or has a wrong row, an id occurs twice or is unknown, or keys of the data section are given that the
            layout has no use for; a line names file and line.
    """
    folder = local(config.path, "data.path")
    if not folder.is_dir():
        raise InputError(
            "data.path", f"{config.path} given", f"{task} reads a local folder with {CORPUS}, {QUERIES} and {QRELS}/test.tsv", "give one"
        )
    given = {"files": config.files is not None, "columns": config.columns != Columns(), "subset": config.subset is not None}
    given |= {"header": not config.header, "quoting": config.quoting is not None}
    problems = [
        Problem(f"data.{key}", "given", f"{task} reads the files and columns of BEIR's layout", "leave it out")
        for key, one in given.items()
        if one
    ]
    if problems:
        raise InputError.of(problems)
    limit, prompts = (
        Limit(config.max_expanded_gb, "data.max_expanded_gb"),
        config.prompts if isinstance(config.prompts, Prompts) else Prompts(),
    )
    queries = _texts(_file(folder / QUERIES), limit, prompts.query, titles=False)
    documents = _texts(_file(folder / CORPUS), limit, prompts.document, titles=True)
    files = {split: _existing(folder / QRELS / f"{split}.tsv") for split in SPLITS}
    if files["test"] is None and files["dev"] is None:
        raise InputError(
            f"{folder / QRELS}", "no test.tsv and no dev.tsv", "judgements are needed to measure the results", "add one of them"
        )
    judgements = {split: _judgements(file, limit, queries, documents) for split, file in files.items() if file is not None}
    return Collection(folder, queries, documents, judgements)


def read_candidates(read: Collection, split: str, config: DataConfig) -> dict[str, list[str]]:
    """Returns for each query of a split what a first search found, the highest score first; nothing without candidates/SPLIT.tsv.

    Raises:
        InputError: A row is wrong, or an id is unknown; the line names file and line.
    """
    file = _existing(read.folder / CANDIDATES / f"{split}.tsv")
    if file is None:
        return {}
    table = Table(file, ("query-id", "corpus-id", "score"), limit=Limit(config.max_expanded_gb, "data.max_expanded_gb"), quoting="none")
    found: dict[str, dict[str, float]] = {}
    for number, (query, document, score) in read_table(table):
        place = table.place(number)
        _check_ids(query, document, read.queries, read.documents, place)
        if document in found.setdefault(query, {}):
            raise InputError(
                place, f"document {shown(document)} is a candidate of query {shown(query)} again", remedy="remove one of both lines"
            )
        found[query][document] = _number(score, place)
    return {query: sorted(scores, key=lambda name: -scores[name]) for query, scores in found.items()}


def _number(score: str, place: str) -> float:
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(place, f"score {shown(score)} given", "a finite number is allowed")
    return value


def _check_ids(query: str, document: str, queries: Mapping[str, str], documents: Mapping[str, str], place: str) -> None:
    for name, column, texts, where in ((query, "query-id", queries, QUERIES), (document, "corpus-id", documents, CORPUS)):
        if name not in texts:
            raise InputError(place, f"{column} {shown(name)} is no _id of {where}", remedy="correct it or remove the line")


def _existing(path: Path) -> Path | None:
    """Returns the path of a file, or of its compressed form; None where there is neither."""
    return next((one for one in (path, path.with_name(f"{path.name}.gz")) if one.exists()), None)


def _file(path: Path) -> Path:
    found = _existing(path)
    if found is None:
        raise InputError(
            f"{path}", f"no such file, and no {path.name}.gz", f"a folder in BEIR's layout has {CORPUS}, {QUERIES} and {QRELS}/"
        )
    return found


def _texts(file: Path, limit: Limit, prefix: str, *, titles: bool) -> dict[str, str]:
    """Returns the texts of a file by id."""
    table = Table(file, ("_id", "title", "text") if titles else ("_id", "text"), limit=limit, optional=("title",))
    texts: dict[str, str] = {}
    for number, (name, *parts) in read_table(table):
        place = table.place(number)
        key = _id(name, "_id", place)
        if key in texts:
            raise InputError(place, f"_id {shown(key)} occurs again", "every text needs an id of its own")
        words = [str(row_of((part,), "text", file.parent, place)) for part in parts if part is not None]
        texts[key] = prefix + " ".join(word for word in words if word)
    if not 1 <= len(texts) <= MOST_TEXTS:
        raise InputError(f"{file}", f"{len(texts)} texts", f"1 to {MOST_TEXTS} are allowed")
    return texts


def _id(value: object, column: str, place: str) -> str:
    """Returns an id as text; numbers stand for their digits."""
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
        return str(value)
    raise InputError(place, f"{column} {value!a:.60} given", "a text or a number is allowed")


def _judgements(file: Path, limit: Limit, queries: Mapping[str, str], documents: Mapping[str, str]) -> dict[tuple[str, str], int]:
    table = Table(file, ("query-id", "corpus-id", "score"), limit=limit, quoting="none")
    found: dict[tuple[str, str], int] = {}
    for number, (query, document, score) in read_table(table):
        place = table.place(number)
        _check_ids(query, document, queries, documents, place)
        if (query, document) in found:
            raise InputError(
                place, f"query {shown(query)} and document {shown(document)} are judged again", remedy="remove one of both lines"
            )
        found[query, document] = _grade(score, place)
    if not any(found.values()):
        raise InputError(f"{file}", "no document is relevant (score 1 or more) to any query", "at least one has to be")
    return found


def _grade(score: str, place: str) -> int:
    """Returns the grade of a judgement, at least 0."""
    try:
        grade = int(score)
    except ValueError:
        grade = LARGEST_GRADE + 1
    if grade > LARGEST_GRADE:
        raise InputError(place, f"score {shown(score)} given", f"an integer up to {LARGEST_GRADE} is allowed (0 or less: not relevant)")
    return max(0, grade)
