"""Queries and documents as the rows of a run.

    evaluation  the judged queries of test (else dev), and all documents
    selection   the judged queries of dev, else a part of the judged queries of train, with the documents they were judged on and at most
                2,000 others
    train       pairs of a train query and a relevant document; with `data.negatives` also irrelevant documents among the candidates of a
                first search (candidates/train.tsv)

A query text of the evaluation split is in no other split, a query text of the selection split is not in train.

Without train judgements, training and calibration read documents and no queries. The documents include those of the evaluation: they are
known when an index is built. If dev is missing too, selection is the inverse cloze task (https://arxiv.org/abs/1906.00300) on held-out
documents: the first sentence of each is a query, the rest is the document to retrieve.

Negatives are evenly spaced among the first 50 candidates, because the nearest candidates are often relevant but unjudged. The negatives of
a query with several relevant documents are divided among these documents.

If the recipe gives no prompts, the model's own prompts are used: a model trained with prompts retrieves less without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from compress.reading.beir import CANDIDATES, FIRST, Collection, Judgements, read_candidates, read_collection
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.core.spread import spread
from foundation.data.config import DataConfig, Prompts
from foundation.data.splits import Data, Split, hold_out, selection_rows
from foundation.labels import relevance, text_groups
from foundation.labels.tasks import Task
from foundation.labels.value import SCORE, Numbers
from foundation.labels.vectors import Pairs
from foundation.models.files import find
from foundation.models.heads.embedding import search_prompts
from foundation.standalone.preprocess import Row

OTHER_DOCUMENTS = 2000
"""Documents of the selection split that none of its queries was judged on."""
_SENTENCE_END = re.compile(r"[.!?]\s+(?=\S)")


def load_judged(config: DataConfig, task: Task, log: Callable[[str], None], model: str | None = None) -> Data:
    """Reads a folder in the layout of BEIR.

    Args:
        config: The data section.
        task: The task, for messages.
        log: Receives messages about what was found and decided.
        model: Hub id or folder of the model, whose prompts count where the recipe gives none; None for random weights.

    Raises:
        InputError: A file is missing or has a wrong row; see `compress.reading.beir`.
    """
    found = read_collection(config if config.prompts is not None or model is None else _as_trained(config, model, log), task)
    final = "test" if "test" in found.judgements else "dev"
    evaluation = _retrieval(found, found.judgements[final], list(found.documents))
    evaluated = _texts(found, found.judgements[final])
    dev = _without(found, found.judgements["dev"], evaluated) if final == "test" and "dev" in found.judgements else {}
    train = _without(found, found.judgements.get("train", {}), evaluated)
    if train and not dev:
        dev = _part(found, train)
        log(f"data: {len(_texts(found, dev))} train queries, chosen by content hash, are set aside for selection")
    positives = _without(found, train, _texts(found, dev)) if dev else {}
    rows, selection = _pairs(found, positives, _negatives(found, positives, config), log), _selection(found, dev)
    if not len(rows):
        log(f"data: {found.folder} has no queries to train on: training and calibration read only its documents")
        rows = _documents(list(found.documents.values()))
        if not dev:
            rest, chosen = hold_out(rows, selection_rows(len(rows)) / len(rows))
            rows, selection = _documents(rest.rows), _inverse_cloze([str(row) for row in chosen.rows])
            log(f"data: {len(chosen)} documents are held out for selection; the first sentence of each is its query")
    if not len(rows) or not len(selection):
        raise InputError(
            f"{found.folder}", f"{len(found.documents)} document(s) give no train rows and selection rows", remedy="add documents"
        )
    log(f"data: {len(rows)} train, {len(selection)} selection, {len(evaluation)} evaluation texts, of which {_in_words(evaluation)}")
    return Data(rows, selection, evaluation, SCORE)


def _as_trained(config: DataConfig, model: str, log: Callable[[str], None]) -> DataConfig:
    """Returns the data section with the prompts of the model."""
    query, document = search_prompts(find(model, "model.path", weights=False))
    if not query and not document:
        return config
    log(f"data: the model's prompts are {shown(query)} before queries and {shown(document)} before documents (data.prompts)")
    return config.model_copy(update={"prompts": Prompts(query=query, document=document)})


def _in_words(split: Split) -> str:
    queries = int(np.sum(split.labels.array[:, 0] == relevance.QUERY))
    return f"{queries} queries and {len(split) - queries} documents"


def _texts(collection: Collection, judgements: Judgements) -> set[str]:
    """Returns the texts of the queries that were judged."""
    return {collection.queries[query] for query, _ in judgements}


def _without(collection: Collection, judgements: Judgements, texts: set[str]) -> Judgements:
    """Returns the judgements of queries whose texts are not among these."""
    return {key: grade for key, grade in judgements.items() if collection.queries[key[0]] not in texts}


def _retrieval(collection: Collection, judgements: Judgements, documents: Sequence[str]) -> Split:
    """Returns a split of the judged queries and these documents."""
    queries = {name: number for number, name in enumerate(dict.fromkeys(query for query, _ in judgements))}
    places = {name: number for number, name in enumerate(documents)}
    known = [(queries[query], places[document], grade) for (query, document), grade in judgements.items()]
    rows: list[Row] = [*(collection.queries[name] for name in queries), *(collection.documents[name] for name in documents)]
    return Split(rows, relevance.labels_of(len(queries), len(documents), known))


def _part(collection: Collection, train: Judgements) -> Judgements:
    """Returns the judgements of some queries, chosen by content hash; none if there is only one query."""
    texts = sorted(_texts(collection, train))
    rows: list[Row] = [*texts]
    chosen = hold_out(Split(rows, Numbers(np.zeros(len(rows)))), selection_rows(len(rows)) / len(rows))[1] if len(rows) > 1 else None
    kept = set() if chosen is None else {str(row) for row in chosen.rows}
    return {key: grade for key, grade in train.items() if collection.queries[key[0]] in kept}


def _selection(collection: Collection, dev: Judgements) -> Split:
    """Returns the queries of dev, the documents that they were judged on, and others, chosen by content hash."""
    known = list(dict.fromkeys(document for _, document in dev))
    others = [name for name in collection.documents if name not in set(known)]
    if len(others) > OTHER_DOCUMENTS:
        rows: list[Row] = [collection.documents[name] for name in others]
        chosen = set(hold_out(Split(rows, Numbers(np.zeros(len(rows)))), OTHER_DOCUMENTS / len(rows))[1].rows)
        others = [name for name in others if collection.documents[name] in chosen]
    return _retrieval(collection, dev, [*known, *others] if dev else [])


def _negatives(collection: Collection, train: Judgements, config: DataConfig) -> dict[tuple[str, str], list[str]]:
    """Returns the ids of irrelevant documents for each query and relevant document; none without `data.negatives`.

    Raises:
        InputError: There is no candidates/train.tsv, or it has a wrong row.
    """
    if config.negatives is None:
        return {}
    key, given = "data.negatives", f"{config.negatives} given"
    if not train:
        raise InputError(key, given, f"{collection.folder} has no queries to train on", "add qrels/train.tsv, or leave it out")
    known = read_candidates(collection, "train", config)
    if not known:
        file = collection.folder / CANDIDATES / "train.tsv"
        remedy = "add it (query-id, corpus-id, score), or leave it out"
        raise InputError(key, given, f"{file} says which documents a first search found", remedy)
    relevant: dict[str, list[str]] = {}
    for (query, document), grade in train.items():
        if grade > 0:
            relevant.setdefault(query, []).append(document)
    negatives: dict[tuple[str, str], list[str]] = {}
    for query, right in relevant.items():
        texts = {collection.documents[document] for document in right}
        wrong = [
            name for name in known.get(query, [])[:FIRST] if train.get((query, name), 0) == 0 and collection.documents[name] not in texts
        ]
        chosen = spread(wrong, config.negatives * len(right))
        negatives |= {(query, document): chosen[number :: len(right)] for number, document in enumerate(right)}
    return negatives


def _pairs(collection: Collection, train: Judgements, negatives: Mapping[tuple[str, str], list[str]], log: Callable[[str], None]) -> Split:
    """Returns the texts of all pairs of a query and a relevant document, each pair followed by its negatives."""
    groups: list[tuple[str, ...]] = []
    for (query, document), grade in train.items():
        if grade > 0:
            wrong = dict.fromkeys(collection.documents[name] for name in negatives.get((query, document), []))
            groups.append((collection.queries[query], collection.documents[document], *wrong))
    rows: list[Row] = [text for group in text_groups.filled(groups) for text in group]
    if len(rows) > text_groups.MOST_TEXTS:
        raise InputError(
            f"{collection.folder}", f"{len(groups)} train pairs, {len(rows)} texts", f"at most {text_groups.MOST_TEXTS} are allowed"
        )
    if negatives and groups:
        most = max(map(len, groups))
        fewer = sum(len(group) < most for group in groups)
        pairs = f"{len(groups)} pairs of query and document to train on, with up to {most - text_groups.PAIR} negatives"
        log(f"data: {pairs}; {fewer} have fewer, and take as much time as the others")
    return Split(rows, text_groups.labels_of(groups))


def _documents(rows: Sequence[Row]) -> Split:
    """Returns texts without partners: each is its own group."""
    return Split(list(rows), Pairs(np.stack([np.arange(len(rows)), np.zeros(len(rows))], axis=1).astype(np.float32)))


def _inverse_cloze(documents: Sequence[str]) -> Split:
    """Returns the first sentences of documents as queries, and the rest of each as its relevant document."""
    cut = [parts for document in documents if (parts := opening(document)) is not None]
    rows: list[Row] = [*(first for first, _ in cut), *(rest for _, rest in cut)]
    return Split(rows, relevance.labels_of(len(cut), len(cut), [(number, number, 1) for number in range(len(cut))]))


def opening(text: str) -> tuple[str, str] | None:
    """Splits a text after its first sentence, or in the middle if it has only one; None for a single word."""
    end = _SENTENCE_END.search(text)
    if end is not None:
        return text[: end.end()].strip(), text[end.end() :].strip()
    words = text.split()
    half = len(words) // 2
    return (" ".join(words[:half]), " ".join(words[half:])) if half else None
