"""Pairs and triplets of sentences, for models that turn a single text into a vector.

    pairs with scores      (a, b) and s      texts a, b       labels  (s - low) / (high - low), in [0, 1] on the train split
                                                                      (`foundation.labels.vectors`)
    pairs without scores   (a, p)            texts a, p       labels  which texts belong together (`foundation.labels.text_groups`)
    triplets               (a, p, n)         texts a, p, n    the same
      of several negatives (a, p, n, m, ...) texts a, p, ...  the same; rows with fewer negatives than others are filled up
                                                              (`foundation.labels.text_groups.filled`)
      with margins                                            the same, and the margin of each negative, on the train split

A file is of the first kind where it has a column of scores, of the last where the recipe names some of negatives. All files of a split are
of one kind. Rows to train on may be of any; the task says what a model is judged by, for evaluation and for selection.

Texts are cut apart after rows were divided into splits: the texts of a row are always in the same one. Rows are told apart by their first
two texts, so that no pair of the selection split is trained on as part of a triplet. The scale of the scores changes no metric, as these
are correlations, and gives the loss of training a cosine to learn; without scores to train on they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from compress.reading import labels
from compress.reading.sources import Source, read_sources, repeats_of
from foundation.core.errors import InputError, Problem
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, with_test
from foundation.labels import text_groups, vectors
from foundation.labels.tasks import TASKS, Task, tasks_with
from foundation.labels.value import SCORE, Numbers
from foundation.standalone.preprocess import Row

Kind = Literal["pairs with scores", "pairs without scores", "triplets"]


@dataclass(frozen=True)
class _Read:
    """The rows of all splits, numbered through."""

    splits: dict[str, Split]
    """Pairs of texts, and for labels the number of each row, float64 `[n]`."""
    kinds: Mapping[str, Kind]
    """Contents of each split."""
    scores: np.ndarray
    """Score of each row by its number, float32; 0 without one."""
    negatives: list[tuple[str, ...]]
    """Negatives of each row by its number; empty without."""
    margins: list[tuple[float, ...]]
    """Margins of these negatives; empty without."""

    def groups(self, split: Split, most: int | None = None) -> list[tuple[str, ...]]:
        """Returns the texts of each row: an anchor, a positive, and negatives, if any, the first `most` of them."""
        pairs = [row for row in split.rows if isinstance(row, tuple)]
        assert len(pairs) == len(split), "the columns of the task make pairs"
        return [(*pair, *self.negatives[number][:most]) for pair, number in zip(pairs, split.labels.array.astype(np.int64), strict=True)]


def load_texts(config: DataConfig, task: Task, log: Callable[[str], None]) -> Data:
    """Reads pairs and triplets, and returns the data with a row for each text.

    Args:
        config: The data section.
        task: The task.
        log: Receives messages about what was found and decided.

    Raises:
        InputError: Files or scores are wrong, a split mixes kinds of rows, or there are none of the kind that the task is judged by.
    """
    where = f"data.path {config.path}"
    sources = read_sources(config, task, log)
    unlabelled = labels.drop_unlabelled(sources, log)
    read = _read(sources)
    train, judged = read.kinds["train"], judged_kind(task)
    _check_judged(sources, read.kinds, judged)
    splits = read.splits
    if not unlabelled:
        with_test(splits, config.path, log)
    data = divide(splits["train"], splits.get("test"), splits.get("validation"), SCORE, where, log, config.keep_evaluation_rows)
    if train != judged and bool(np.isin(data.selection.labels.array, read.splits["train"].labels.array).any()):
        raise _needs_both(where, train, judged)
    low, high = _scale(data.train, read, where) if train == "pairs with scores" else (0.0, 1.0)
    log(f"data: each text is a row of its own; {_in_words(train, low, high, read.groups(data.train, config.negatives))}")
    return replace(
        data,
        train=_scored(data.train, read, low, high, where) if train == "pairs with scores" else _grouped(data.train, read, config, where),
        selection=_judged(data.selection, judged, read, low, high, where),
        evaluation=_judged(data.evaluation, judged, read, low, high, where),
    )


def judged_kind(task: Task) -> Kind:
    """Returns the rows that a model of a task is judged by."""
    return "triplets" if TASKS[task].needs_negatives else "pairs with scores"


def _task_of(kind: Kind) -> str:
    """Returns the task whose models are judged by rows of a kind."""
    return tasks_with(lambda row: row.needs_pairs and row.needs_negatives == (kind == "triplets"))


def _in_words(train: Kind, low: float, high: float, groups: Sequence[tuple[str, ...]]) -> str:
    if train == "pairs with scores":
        return f"the rows of train are pairs, their scores {low:g} to {high:g} are scaled to 0 to 1"
    most = max(map(len, groups))
    several = f" with up to {most - text_groups.PAIR} negatives" if most > text_groups.TRIPLET else ""
    fewer = sum(len(group) < most for group in groups)
    rest = f"; {fewer} of {len(groups)} have fewer, and take the time of as many texts" if fewer else ""
    return f"the rows of train are {train}{several}{rest}"


def _margins(sources: Sequence[Source]) -> list[tuple[float, ...]]:
    """Returns the margins of the rows of a split; empty ones without."""
    for source in sources:
        if bool(source.margins) != bool(sources[0].margins):
            names = (source, sources[0]) if source.margins else (sources[0], source)
            raise InputError(names[0].name, f"margins, and {names[1].name} has none", "all files of a split need the same columns")
    return [margins for source in sources for margins in source.margins or [()] * len(source.rows)]


def _read(sources: Mapping[str, Sequence[Source]]) -> _Read:
    """Numbers all rows, and takes their scores and negatives out of the files."""
    problems: list[Problem] = []
    splits: dict[str, Split] = {}
    kinds: dict[str, Kind] = {}
    scores: list[np.ndarray] = []
    negatives: list[tuple[str, ...]] = []
    margins: list[tuple[float, ...]] = []
    start = 0
    for name, found in sources.items():
        rows = [row for source in found for row in source.rows]
        splits[name] = Split(rows, Numbers(np.arange(start, start + len(rows), dtype=np.float64)), repeats=repeats_of(found))
        start += len(rows)
        try:
            kinds[name] = _kind_of(found)
            _check_triplets(found)
            margins += _margins(found)
            scores.append(labels.values(found) if kinds[name] == "pairs with scores" else np.zeros(len(rows), np.float32))
        except InputError as error:
            problems += error.problems
        negatives += [texts for source in found for texts in source.negatives or [()] * len(source.rows)]
    if problems:
        raise InputError.of(problems)
    return _Read(splits, kinds, np.concatenate(scores), negatives, margins)


def _kind_of(sources: Sequence[Source]) -> Kind:
    """Returns the contents of all files of a split."""
    kinds: list[Kind] = ["pairs with scores" if one.scored else "triplets" if one.negatives else "pairs without scores" for one in sources]
    for source, kind in zip(sources, kinds, strict=True):
        if kind != kinds[0]:
            raise InputError(source.name, f"{kind}, and {sources[0].name} has {kinds[0]}", "all files of a split need the same columns")
    return kinds[0]


def _check_triplets(sources: Sequence[Source]) -> None:
    """Raises if a row names one text as positive and as negative."""
    both = [
        source.place(index)
        for source in sources
        for index, (row, negatives) in enumerate(zip(source.rows, source.negatives, strict=False))
        if isinstance(row, tuple) and row[1] in negatives
    ]
    if both:
        more = f" (and {len(both) - 1} more rows like this)" if len(both) > 1 else ""
        raise InputError(both[0], "positive and negative are the same text", remedy=f"remove the row{more}")


def _check_judged(sources: Mapping[str, Sequence[Source]], kinds: Mapping[str, Kind], judged: Kind) -> None:
    """Raises if rows for evaluation or selection are not of the kind that the task is judged by, or are missing."""
    for name in ("test", "validation"):
        if name in kinds and kinds[name] != judged:
            instead = "" if kinds[name] == "pairs without scores" else f", or model.task to {_task_of(kinds[name])}"
            given, remedy = f"{kinds[name]} given to judge models by", f"set {_columns(judged)} of this file{instead}"
            raise InputError(sources[name][0].name, given, f"{judged} are needed", remedy)
    if kinds["train"] != judged and not {"test", "validation"} <= kinds.keys():
        raise _needs_both(sources["train"][0].name, kinds["train"], judged)


def _columns(kind: Kind) -> str:
    return "data.columns.negative" if kind == "triplets" else "data.columns.label"


def _needs_both(where: str, train: Kind, judged: Kind) -> InputError:
    remedy = f"name both in data.files, with {_columns(judged)}"
    return InputError(where, f"{train} to train on, which judge no model", f"test and validation splits of {judged} are needed", remedy)


def _scale(train: Split, read: _Read, where: str) -> tuple[float, float]:
    """Returns the lowest and the highest score of the train split."""
    found = read.scores[train.labels.array.astype(np.int64)]
    low, high = float(found.min()), float(found.max())
    if low == high:
        raise InputError(where, f"all train pairs have the score {low:g}", "scores that differ are needed", "set data.columns.label")
    return low, high


def _judged(split: Split, kind: Kind, read: _Read, low: float, high: float, where: str) -> Split:
    """Returns a split that models are judged by, with a row for each text."""
    return _scored(split, read, low, high, where) if kind == "pairs with scores" else _rows_of(read.groups(split), [], where)


def _scored(split: Split, read: _Read, low: float, high: float, where: str) -> Split:
    """Returns a split of pairs with scores, with a row for each text."""
    if len(split) > vectors.MOST_PAIRS:
        raise InputError(where, f"{len(split)} pairs in a split", f"at most {vectors.MOST_PAIRS} are allowed")
    scores = (read.scores[split.labels.array.astype(np.int64)].astype(np.float64) - low) / (high - low)
    return Split([text for pair in read.groups(split) for text in pair], vectors.labels_of(scores))


def _grouped(train: Split, read: _Read, config: DataConfig, where: str) -> Split:
    """Returns the train split of pairs without scores, or of triplets, with a row for each text."""
    margins = [read.margins[number][: config.negatives] for number in train.labels.array.astype(np.int64)] if any(read.margins) else []
    return _rows_of(read.groups(train, config.negatives), margins, where)


def _rows_of(groups: Sequence[tuple[str, ...]], margins: Sequence[tuple[float, ...]], where: str) -> Split:
    rows: list[Row] = [text for group in text_groups.filled(groups) for text in group]
    if len(rows) > text_groups.MOST_TEXTS:
        raise InputError(where, f"{len(rows)} texts in a split", f"at most {text_groups.MOST_TEXTS} are allowed")
    return Split(rows, text_groups.labels_of(groups, margins))
