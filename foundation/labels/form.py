"""The interface of every form of labels. A form is a frozen class in a file of this room; no other code looks at the shape of an array.

    labels.values(answers)        not  if labels.ndim == 4: ... elif labels.shape[1] == 2: ...

To add a form, write its class next to its answer (`foundation.labels.answer`): readers make it (`foundation.data`), metrics and losses take
it. If a flip is something other than a changed class, it has a file and a row in `compress.report.flips` as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from foundation.core import runs
from foundation.core.arrays import Array
from foundation.core.spread import spread

MOST_CLASSES = 5
"""Classes, the most frequent ones, that are tried as the one answer."""
Figure = Callable[[Array, Array], float]
"""Metric as a function of what `Labels.values` returns."""


@dataclass(frozen=True, eq=False)
class Labels(ABC):
    """The labels of the rows of a split. A choice of rows keeps its labels."""

    array: Array
    """The numbers as they are stored, `[n, ...]`; the file of each form says what they mean."""

    DTYPE: ClassVar[type] = np.float32
    """Type of the numbers in files of predictions."""
    METRICS: ClassVar[Mapping[str, Figure]] = {}
    """Metrics that no other form has, by name."""
    ARE_SHARES: ClassVar[bool] = False
    """Whether these are shares of the predictions, written in percent."""
    COMPARED: ClassVar[bool] = False
    """Whether rows of different runs are compared, so that a process needs the labels of others."""
    KNOWN: ClassVar[bool] = True
    """Whether the rows have labels. The numbers of unknown ones are all 0, and no loss may read them."""
    SHUFFLED: ClassVar[bool] = True
    """Whether the answer to one row can be taken for the answer to another one."""
    ONE_CLASS: ClassVar[bool] = False
    """Whether every row that counts has exactly one class."""
    RUN: ClassVar[str] = ""
    """Name of the rows, for messages; empty: texts of a pair or triplet."""

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice | Sequence[int] | Array) -> Self:
        return replace(self, array=self.array[rows])

    def values(self, answers: Array) -> tuple[Array, Array]:
        """Returns the values that metrics are means over, `[m, ...]`, and their labels, `[m, ...]`, from predictions `[n, ...]`."""
        return answers, self.array

    def count(self) -> int:
        """Returns the number of predictions to evaluate."""
        return len(self)

    def rows_of_values(self) -> Array:
        """Returns the rows of each value, int64 `[m, 1]` or `[m, 2]`: one that stands for all, or both texts of a pair."""
        return np.arange(len(self))[:, None]

    def grouped_by(self, content: Any) -> Any:
        """Returns the part of the content of a value (a row, or a pair of texts) that groups are made of."""
        return content

    @abstractmethod
    def pseudo_labels(self, answers: Array) -> Self:
        """Turns the predictions of a teacher into labels of this form (pseudo-labels).

        Args:
            answers: Predictions for the same rows, float32 `[n, ...]`.
        """

    def choices(self, answers: Array) -> tuple[Array, Array] | None:
        """Returns the predicted and the true class of each value (of tokens: of each token), int64 `[k]`; None if there are no classes."""
        return None

    def class_counts(self, answers: Array) -> Array | None:
        """Returns for each class how often it is right, predicted and true, int64 `[C, 3]`; None if there are no classes."""
        return None

    def class_names(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the names of the classes of `class_counts`, given the names of the outputs of the model."""
        return names

    def constants(self, answers: Array) -> Iterator[Array]:
        """Yields predictions of the shape of `answers` that are the same for all rows (`foundation.measure.chance`)."""
        yield np.zeros_like(answers)

    def unit(self, reference: Array) -> float:
        """Returns the unit of differences between two predictions; 1 where logits need none."""
        return 1.0

    def of_tower(self, tower: str | None) -> Array:
        """Returns the rows that a tower reads (image or text; None: all), int64 `[m]`."""
        return np.arange(len(self))

    def evenly(self, count: int) -> list[int]:
        """Returns about so many rows, evenly spaced."""
        return spread(range(len(self)), count)

    def first(self, count: int) -> list[int]:
        """Returns about so many rows, the first ones."""
        return list(range(min(count, len(self))))

    def sample(self, count: int) -> list[int]:
        """Returns about so many rows, evenly spaced, that can be judged without the others."""
        return self.evenly(count)

    def runs(self) -> Array:
        """Returns the sizes of the runs of rows that are learned together (`foundation.core.runs`), int64 `[r]`."""
        return runs.equal(len(self), 1)

    def renumber(self, sizes: Array) -> Self:
        """Renumbers runs of these sizes `[r]`, so that one drawn twice in a batch counts as two."""
        return self

    def blank(self, count: int) -> Self:
        """Returns labels for so many rows that have none."""
        return replace(self, array=np.zeros((count, *self.array.shape[1:]), self.array.dtype))

    def joined(self, other: Self) -> Self:
        """Returns these labels followed by others of the form."""
        return replace(self, array=np.concatenate([self.array, other.array]))


def zeros_beside(figures: Array) -> tuple[Array, Array]:
    """Returns figures `[m, k]` as values whose labels say nothing more."""
    return figures, np.zeros(len(figures), np.float32)


def counts_of_ids(predicted: Array, true: Array, least: int = 0) -> Array:
    """Counts how often each class is right, predicted and true, int64 `[C, 3]`, from class ids `[n]`; C is at least `least`."""
    size = max(least, int(max(predicted.max(initial=-1), true.max(initial=-1))) + 1)
    parts = (predicted[predicted == true], predicted, true)
    return np.stack([np.bincount(part, minlength=size) for part in parts], axis=1).astype(np.int64)


def first_rows(numbers: Array) -> Array:
    """Returns the first row with each number, int64 `[m, 1]`, given the numbers of rows `[n]`."""
    return np.unique(numbers, return_index=True)[1].astype(np.int64).reshape(-1, 1)


def whole_groups(parts: Sequence[Array], count: int) -> list[int]:
    """Returns the rows of evenly spaced groups, about `count` rows, given the rows of their parts, int64 `[g]` each."""
    groups = list(zip(*(rows.tolist() for rows in parts), strict=True))
    return [row for group in spread(groups, count // len(parts)) for row in group]


def rows_of_parts(parts: Sequence[Array]) -> Array:
    """Returns the first two rows of each group, int64 `[m, 2]`, given the rows of their parts."""
    return np.stack(list(parts)[:2], axis=1)
