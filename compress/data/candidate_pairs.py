"""Queries with the candidates of a first search, as pairs of texts that a model gives a score.

A folder in the layout of BEIR (`compress.data.beir`) has what a first search found beside it:

    FOLDER/candidates/SPLIT.tsv    query-id, corpus-id, score below a header line; the higher the score, the earlier

    evaluation  the judged queries of test (else dev), each with its first candidates
    selection   the same of dev; else the inverse cloze task (`compress.data.judged_texts`) on documents that are held out, each first
                sentence with its own rest and the rests of 9 others
    train       a query of train with each relevant document (1), and for each of those with 4 candidates that are not (0); where train is
                missing first sentences of documents with their own rest (1) and those of 4 others (0)

The candidates that are not relevant are evenly spread over those that a model will be asked about. The nearest ones alone are nearer to
their query than most relevant documents are, from which a model can learn that what is near is wrong.

Queries with the text of one in evaluation are in no other split, those with the text of one in selection not in train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from compress.core.errors import InputError
from compress.core.forms import candidates
from compress.core.spread import spread
from compress.core.tasks import SCORE, Task
from compress.data.beir import CANDIDATES, Collection, read_candidates, read_collection
from compress.data.config import DataConfig
from compress.data.judged_texts import opening
from compress.data.splits import Data, Split, hold_out, selection_rows
from compress.standalone.preprocess import Row

FIRST = 50
"""Candidates of a query, where the recipe does not say."""
WRONG = 4
"""Pairs with the label 0 for each with the label 1."""
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
            f"{read.folder / CANDIDATES}: no {final}.tsv, and no {final}.tsv.gz; {task} reads there what a first search found: query-id, "
            "corpus-id, score"
        )
    evaluation = _asked(read, final, found[final], config.candidates or FIRST, set())
    seen = {row[0] for row in evaluation.rows if isinstance(row, tuple)}
    selection = train = None
    if final == "test" and found.get("dev"):
        selection = _asked(read, "dev", found["dev"], config.candidates or FIRST, seen)
        seen |= {row[0] for row in selection.rows if isinstance(row, tuple)}
    if found.get("train"):
        train = _judged_pairs(read, found["train"], config.candidates or FIRST, seen)
    if train is None or selection is None:
        rest, held_out = _openings(read)
        if not rest or not held_out:
            raise InputError(
                f"{read.folder}: {len(read.documents)} document(s) of two words and more; more are needed to train and to select on"
            )
        if train is None:
            log(f"data: {read.folder} has no qrels/train.tsv with candidates: training and calibration pair first sentences of documents")
            train = _opening_pairs(rest)
        if selection is None:
            selection = _opening_choices(held_out)
            log(f"data: {len(held_out)} documents are held out for selection; the first sentence of each is its query")
    queries = candidates.num_queries(evaluation.labels)
    log(f"data: {len(train)} train, {len(selection)} selection, {len(evaluation)} evaluation pairs, these of {queries} queries")
    return Data(train, selection, evaluation, SCORE)


def _asked(read: Collection, split: str, found: Found, count: int, seen: set[str]) -> Split:
    """Returns the judged queries of a split, with other texts than those seen, and the first candidates of each."""
    known: dict[str, dict[str, int]] = {}
    for (query, document), grade in read.judgements[split].items():
        if read.queries[query] not in seen:
            known.setdefault(query, {})[document] = grade
    lonely = [query for query in known if not found.get(query)]
    if lonely:
        raise InputError(
            f"{read.folder / CANDIDATES}: {len(lonely)} of {len(known)} judged queries of {split} have no candidate, the first of them "
            f"{lonely[0]!a:.60}; add lines to {split}.tsv"
        )
    rows: list[Row] = []
    numbers, grades = [], []
    for number, (query, judged) in enumerate(known.items()):
        for document in found[query][:count]:
            rows.append((read.queries[query], read.documents[document]))
            numbers.append(number)
            grades.append(judged.get(document, 0))
    return Split(rows, candidates.labels_of(numbers, grades, [list(judged.values()) for judged in known.values()]))


def _judged_pairs(read: Collection, found: Found, count: int, seen: set[str]) -> Split | None:
    """Returns relevant pairs of train, and candidates that are not relevant; None without a query that was not seen."""
    judgements, rows, values = read.judgements["train"], [], []
    relevant: dict[str, list[str]] = {}
    for (query, document), grade in judgements.items():
        if grade > 0 and read.queries[query] not in seen:
            relevant.setdefault(query, []).append(document)
    for query, right in relevant.items():
        wrong = [name for name in found.get(query, [])[:count] if judgements.get((query, name), 0) == 0]
        wrong = spread(wrong, WRONG * len(right))
        for number, document in enumerate(right):
            own = wrong[number :: len(right)]
            rows += [(read.queries[query], read.documents[name]) for name in (document, *own)]
            values += [1.0, *[0.0] * len(own)]
    return Split(list(rows), np.array(values, np.float32)) if rows else None


def _openings(read: Collection) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the first sentences and rests of documents, and those of documents that are held out."""
    rows: list[Row] = [parts for text in dict.fromkeys(read.documents.values()) if (parts := opening(text)) is not None]
    if len(rows) < 2:
        return [], []
    rest, held_out = hold_out(Split(rows, np.zeros(len(rows))), selection_rows(len(rows)) / len(rows))
    pairs = [[row for row in split.rows if isinstance(row, tuple)] for split in (rest, held_out)]
    return pairs[0], pairs[1]


def _opening_pairs(parts: Sequence[tuple[str, str]]) -> Split:
    """Returns each first sentence with its own rest, and with those of the documents behind it."""
    rows: list[Row] = []
    values: list[float] = []
    wrong = min(WRONG, len(parts) - 1)
    for number, (first, rest) in enumerate(parts):
        rows += [(first, rest), *((first, parts[(number + step) % len(parts)][1]) for step in range(1, wrong + 1))]
        values += [1.0, *[0.0] * wrong]
    return Split(rows, np.array(values, np.float32))


def _opening_choices(parts: Sequence[tuple[str, str]]) -> Split:
    """Returns each first sentence with the rests of as many documents as there are choices; where its own stands among them changes."""
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
