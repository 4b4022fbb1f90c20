"""Queries with the candidates of a first search, as pairs of texts that a model gives a score.

A folder in the layout of BEIR (`compress.reading.beir`) has what a first search found next to it:

    FOLDER/candidates/SPLIT.tsv    query-id, corpus-id, score below a header line; the higher the score, the earlier

    evaluation  the judged queries of test (else dev), each with its first candidates
    selection   the same of dev; else the inverse cloze task (`compress.reading.judged_texts`) on documents that are held out, each first
                sentence with its own rest and the rests of 9 others
    train       lists: a relevant document of a query of train and 7 documents that are not relevant to it; where train is missing the
                first sentence of a document with its own rest and the rests of 7 others. Each list has a number of its own, so that losses
                compare what is in it (`foundation.training.losses.candidates`)

What is wrong in a list: `compress.reading.wrong_candidates`.

Queries with the text of one in evaluation are in no other split, those with the text of one in selection not in train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from compress.reading.beir import CANDIDATES, FIRST, Collection, read_candidates, read_collection
from compress.reading.judged_texts import opening
from compress.reading.wrong_candidates import WrongCandidates
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, hold_out, selection_rows
from foundation.labels import candidates
from foundation.labels.tasks import Task
from foundation.labels.value import SCORE, Numbers
from foundation.standalone.preprocess import Row

WRONG = 7
"""Documents that are not relevant, in a list with one that is."""
CHOICES = 10
"""Candidates of a first sentence in the selection split."""
Found = dict[str, list[str]]
"""Ids of the documents that were found for the id of a query, the best first."""


def load_candidates(config: DataConfig, task: Task, log: Callable[[str], None]) -> Data:
    """Reads a folder in the layout of BEIR, and the candidates in it.

    Args:
        config: The data section.
        task: The task, for messages.
        log: Receives messages about what was found and decided.

    Raises:
        InputError: A file is missing or has a wrong row, or a judged query of the evaluation has no candidate.
    """
    read = read_collection(config, task)
    found: dict[str, Found] = {split: read_candidates(read, split, config) for split in read.judgements}
    final = "test" if "test" in read.judgements else "dev"
    if not found[final]:
        raise InputError(
            f"{read.folder / CANDIDATES}",
            f"no {final}.tsv, and no {final}.tsv.gz",
            f"{task} reads there what a first search found: query-id, corpus-id, score",
        )
    evaluation = _ranked(read, final, found[final], config.candidates or FIRST, set())
    seen = {row[0] for row in evaluation.rows if isinstance(row, tuple)}
    selection = train = None
    if final == "test" and found.get("dev"):
        selection = _ranked(read, "dev", found["dev"], config.candidates or FIRST, seen)
        seen |= {row[0] for row in selection.rows if isinstance(row, tuple)}
    if found.get("train"):
        train = _judged_lists(read, found["train"], config.candidates or FIRST, seen)
    if train is None or selection is None:
        rest, held_out = _openings(read)
        if not rest or not held_out:
            raise InputError(
                f"{read.folder}", f"{len(read.documents)} document(s) of two words and more", "more are needed to train and to select on"
            )
        if train is None:
            log(f"data: {read.folder} has no qrels/train.tsv with candidates: training and calibration pair first sentences of documents")
            train = _opening_lists(rest)
        if selection is None:
            selection = _opening_choices(held_out)
            log(f"data: {len(held_out)} documents are held out for selection; the first sentence of each is its query")
    queries = evaluation.labels.count()
    log(f"data: {len(train)} train, {len(selection)} selection, {len(evaluation)} evaluation pairs, these of {queries} queries")
    return Data(train, selection, evaluation, SCORE)


def _ranked(read: Collection, split: str, candidate_ids: Found, count: int, seen: set[str]) -> Split:
    """Returns the judged queries of a split, with other texts than those seen, and the first candidates of each."""
    known: dict[str, dict[str, int]] = {}
    for (query, document), grade in read.judgements[split].items():
        if read.queries[query] not in seen:
            known.setdefault(query, {})[document] = grade
    lonely = [query for query in known if not candidate_ids.get(query)]
    if lonely:
        raise InputError(
            f"{read.folder / CANDIDATES}",
            f"{len(lonely)} of {len(known)} judged queries of {split} have no candidate, the first of them {lonely[0]!a:.60}",
            remedy=f"add lines to {split}.tsv",
        )
    rows: list[Row] = []
    numbers, grades = [], []
    for number, (query, judged) in enumerate(known.items()):
        for document in candidate_ids[query][:count]:
            rows.append((read.queries[query], read.documents[document]))
            numbers.append(number)
            grades.append(judged.get(document, 0))
    return Split(rows, candidates.labels_of(numbers, grades, [list(judged.values()) for judged in known.values()]))


def _judged_lists(read: Collection, candidates: Found, count: int, seen: set[str]) -> Split | None:
    """Returns a list for each relevant document of train; None without a query that was not seen."""
    judged: dict[str, dict[str, int]] = {}
    for (query, document), grade in read.judgements["train"].items():
        if read.queries[query] not in seen:
            judged.setdefault(query, {})[document] = grade
    chooser = WrongCandidates((document for grades in judged.values() for document, grade in grades.items() if grade > 0), WRONG)
    lists = [(query, names) for query, grades in judged.items() for names in chooser.lists(grades, candidates.get(query, [])[:count])]
    rows: list[Row] = [(read.queries[query], read.documents[name]) for query, names in lists for name in names]
    grades_of = [[judged[query].get(name, 0) for name in names] for query, names in lists]
    return _numbered(rows, grades_of, [list(judged[query].values()) for query, _ in lists]) if rows else None


def _numbered(rows: list[Row], grades: Sequence[Sequence[int]], known: Sequence[Sequence[int]]) -> Split:
    """Returns lists of rows, each with a number of its own, given the grades in each and all that are known of its query."""
    numbers = [number for number, values in enumerate(grades) for _ in values]
    return Split(rows, candidates.labels_of(numbers, [value for values in grades for value in values], known))


def _openings(read: Collection) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the first sentences and rests of documents, and the same of documents that are held out."""
    rows: list[Row] = [parts for text in dict.fromkeys(read.documents.values()) if (parts := opening(text)) is not None]
    if len(rows) < 2:
        return [], []
    rest, held_out = hold_out(Split(rows, Numbers(np.zeros(len(rows)))), selection_rows(len(rows)) / len(rows))
    pairs = [[row for row in split.rows if isinstance(row, tuple)] for split in (rest, held_out)]
    return pairs[0], pairs[1]


def _opening_lists(parts: Sequence[tuple[str, str]]) -> Split:
    """Returns each first sentence with its own rest, and with the rests of the documents after it."""
    wrong = min(WRONG, len(parts) - 1)
    rows: list[Row] = [
        (first, parts[(number + step) % len(parts)][1]) for number, (first, _) in enumerate(parts) for step in range(wrong + 1)
    ]
    return _numbered(rows, [[1, *[0] * wrong]] * len(parts), [[1]] * len(parts))


def _opening_choices(parts: Sequence[tuple[str, str]]) -> Split:
    """Returns each first sentence with the rests of as many documents as there are choices; its own rest takes changing positions."""
    rows: list[Row] = []
    numbers, grades = [], []
    choices = min(CHOICES, len(parts))
    for number, (first, _) in enumerate(parts):
        for step in range(choices):
            other = (number - number % choices + step) % len(parts)  # blocks of documents, so that every place holds the right one at times
            rows.append((first, parts[other][1]))
            numbers.append(number)
            grades.append(int(other == number))
    return Split(rows, candidates.labels_of(numbers, grades, [[1]] * len(parts)))
