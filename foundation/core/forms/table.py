"""The table of what labels can be: one row for each form. Other code asks the form of some labels, never which one it is.

    form_of(labels).values(answers, labels)        not  if are_captions(labels): ... elif are_pairs(labels): ...

To add a form, write a file in this room that makes, recognizes and judges its labels, add a row to `FORMS`, and a file to
`compress.report.flips`, with its row in `flips.py`, that tells what a flip of it is. A reader makes such labels (`compress.reading.load`)
for the task that has them (`foundation.core.tasks`). Forms exclude each other; labels of no form in the table are class ids or numbers.

Uses only numpy, and pytrec_eval for what is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.core import runs
from foundation.core.forms import (
    candidates,
    captions,
    label_sets,
    next_token,
    ranking,
    relevance,
    spans,
    tags,
    text_groups,
    transcripts,
    vectors,
    zero_shot,
)
from foundation.core.spread import spread

Array = NDArray[Any]
Metric = Callable[[Array, Array], float]
"""Function of predictions and labels; of the values of a form (`Form.values`) as well."""


def _alone(labels: Array, count: int) -> list[int]:
    return spread(range(len(labels)), count)


def _of_groups(parts_of: Callable[[Array], Any]) -> Callable[[Array, int], list[int]]:
    """Returns a function that chooses whole groups, from one that returns the rows of their parts, `[g]` each."""

    def chosen(labels: Array, count: int) -> list[int]:
        parts = parts_of(labels)
        groups = list(zip(*(rows.tolist() for rows in parts), strict=True))
        return [row for group in spread(groups, count // len(parts)) for row in group]

    return chosen


def _rows(rows_of: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns a function to the row of each item, `[m, 1]`, from one that returns it as `[m]`."""
    return lambda labels: np.asarray(rows_of(labels), np.int64).reshape(-1, 1)


def _parts(parts_of: Callable[[Array], Any]) -> Callable[[Array], Array]:
    """Returns a function to the first two rows of each item, `[m, 2]`, from one that returns the rows of their parts, `[m]` each."""
    return lambda labels: np.stack(list(parts_of(labels))[:2], axis=1)


def _first_of(numbers_of: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns a function to the first row of each item, from one that returns the number of the item of each row."""
    return _rows(lambda labels: np.unique(numbers_of(labels), return_index=True)[1])


def _equal(size_of: Callable[[Array], int]) -> Callable[[Array], Array]:
    """Returns a function to the sizes of runs, from one that returns the size that they all share."""
    return lambda labels: runs.equal(len(labels), size_of(labels))


def _with_zeros(figures: Callable[[Array, Array], Array]) -> Callable[[Array, Array], tuple[Array, Array]]:
    """Returns figures as values, next to labels that say nothing more."""

    def values(answers: Array, labels: Array) -> tuple[Array, Array]:
        found = figures(answers, labels)
        return found, np.zeros(len(found), np.float32)

    return values


@dataclass(frozen=True)
class Form:
    """What sets one form of labels apart."""

    fits: Callable[[Array], bool]
    """Whether labels have it."""
    values: Callable[[Array, Array], tuple[Array, Array]] = lambda answers, labels: (answers, labels)
    """Turns predictions `[n, ...]` and labels into the items that metrics are means over, `[m, ...]`, and their labels, `[m]`."""
    count: Callable[[Array], int] = len
    """How many predictions there are to evaluate."""
    units: Callable[[Array], Array] = lambda labels: np.arange(len(labels))[:, None]
    """Maps labels to the rows behind each of these items, int64 `[m, 1]` or `[m, 2]`: one that stands for all, or both texts of a pair."""
    taught: Callable[[Array, Array], Array] | None = None
    """Turns a teacher's predictions into labels of this form; None: they follow from the answer alone."""
    overlap: Callable[[Array, Array, Array], float] = lambda reference, answers, labels: vectors.overlap(reference, answers)
    """Share of the neighbours of a row that the vectors of two models agree on."""
    chosen: Callable[[Array, int], list[int]] = _alone
    """Picks about that many rows, evenly spaced, that can be judged without the others."""
    together: Callable[[Array], Array] = lambda labels: runs.equal(len(labels), 1)
    """Sizes of the runs of rows that are learned together (`foundation.core.runs`), int64 `[r]`."""
    told_apart: Callable[[Array, Array], Array] = lambda labels, sizes: labels
    """Renumbers groups, so that one query drawn twice in a batch counts as two."""
    run: str = ""
    """What the rows of such a run are, for messages; empty: texts of a pair or triplet."""
    runs_apart: bool = False
    """Whether no run is compared with another one, so that a process need not know the runs of others."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics that no other form has, by name."""
    are_shares: bool = False
    """Whether these are shares of the predictions, written in percent."""
    flips: str = "classes"
    """The file in `compress.report.flips` that describes its flips."""


FORMS: Mapping[str, Form] = {
    "captions": Form(
        captions.are_captions,
        values=_with_zeros(captions.figures),
        count=lambda labels: len(captions.judged(labels)),
        units=_rows(captions.judged),
        taught=captions.with_answers,
        overlap=captions.overlap,
        chosen=zero_shot.spread,
        together=_equal(zero_shot.together),
        metrics={name: captions.column(name) for name in captions.FIGURES},
        are_shares=True,
        flips="captions",
    ),
    "images and texts": Form(
        zero_shot.are_images_and_texts,
        values=zero_shot.similarities,
        count=lambda labels: len(zero_shot.judged(labels)),
        units=_rows(zero_shot.judged),
        taught=zero_shot.with_answers,
        chosen=zero_shot.spread,
        together=_equal(zero_shot.together),
        flips="zero_shot",
    ),
    "tags": Form(tags.are_tags, values=_with_zeros(tags.entity_counts), flips="tags"),
    "transcripts": Form(transcripts.are_transcripts, values=_with_zeros(transcripts.figures), flips="transcripts"),
    "spans": Form(
        spans.are_spans,
        values=_with_zeros(spans.figures),
        count=spans.num_questions,
        units=_first_of(spans.numbers_of),
        flips="spans",
    ),
    "queries and documents": Form(
        relevance.are_judged,
        values=_with_zeros(ranking.figures),
        count=lambda labels: len(relevance.judged(labels).queries),
        units=_rows(lambda labels: relevance.judged(labels).queries),
        taught=relevance.with_answers,
        overlap=relevance.overlap,
        metrics={name: ranking.column(name) for name in ranking.FIGURES},
        flips="searched",
    ),
    "candidates": Form(
        candidates.are_candidates,
        values=_with_zeros(ranking.figures),
        count=candidates.num_queries,
        units=_first_of(lambda labels: labels[:, 1]),
        taught=candidates.with_answers,
        together=lambda labels: runs.sizes_of(labels[:, 1]),
        told_apart=candidates.numbered,
        run="candidates of a query",
        runs_apart=True,
        flips="ordered",
    ),
    "pairs and triplets": Form(
        text_groups.are_groups,
        values=text_groups.values,
        count=text_groups.num_judged,
        units=_parts(text_groups.judged),
        taught=text_groups.with_answers,
        chosen=_of_groups(text_groups.judged),
        together=_equal(text_groups.size_of),
        flips="vectors",
    ),
    "pairs": Form(
        vectors.are_pairs,
        values=vectors.similarities,
        count=vectors.num_pairs,
        units=_parts(vectors.partners),
        taught=vectors.with_scores,
        chosen=_of_groups(vectors.partners),
        together=_equal(vectors.together),
        flips="vectors",
    ),
    "sets": Form(label_sets.are_sets, flips="sets"),
    "tokens": Form(next_token.are_tokens, count=lambda labels: int(np.sum(labels != next_token.IGNORED)), flips="tokens"),
}
SINGLE = Form(lambda labels: labels.ndim == 1)
"""The form of class ids and of numbers."""


def form_of(labels: Array) -> Form:
    """Returns the form of labels, the first in the table that they fit."""
    return next((form for form in FORMS.values() if form.fits(labels)), SINGLE)
