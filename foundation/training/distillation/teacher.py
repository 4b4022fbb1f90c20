"""The teacher: frozen, in evaluation mode, and run as rarely as possible.

If all losses need only logits, these are computed once for all training rows (`foundation.training.teacher_logits`). If a loss needs hidden
states or attention, the teacher runs on every batch, without gradient. A teacher with a different tokenizer gets the rows in its own
tokens, which is sufficient for losses on logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.labels.form import Labels
from foundation.models.architecture.origin import Origin
from foundation.models.forward import on_device
from foundation.standalone.preprocess import Row
from foundation.training.distillation.capture import Capture, Captured, Wanted
from foundation.training.distillation.masking import Masking
from foundation.training.rows import CHUNK, Rows
from foundation.training.train import Batch

if TYPE_CHECKING:
    from foundation.standalone.preprocess import Preprocessor

FITTING = "give a model that was trained for this task and these labels"
NEW_HEAD = "give model.head: new"
CACHE_BYTES = 2**30
"""Logits are cached up to this size; beyond it the teacher runs on every batch."""
PROBED_IMAGES = 64
NOTHING = Captured(torch.empty(0))
"""The result for a model without anything to capture; it did not run."""


@dataclass
class Teacher:
    """A frozen model that is run on training rows."""

    capture: Capture
    rows: Rows
    """The training rows as inputs of this model."""
    shared: bool
    """Whether the student has the same inputs, so that both can use the features of a batch."""
    logits: Tensor | None = None
    """Cached logits for all training rows, float32 `[n, C]`; None if the teacher runs on every batch."""
    masking: Masking | None = None
    """Masks tokens of masked copies; features of a shared batch are masked already."""
    origin: Origin | None = None
    """Which parts of this model the student kept, if it is a pruned copy of it; only these are captured."""

    def __call__(self, batch: Batch, wanted: Wanted) -> Captured:
        """Returns the teacher's captured states for a batch, detached."""
        if wanted == Wanted():
            return NOTHING
        if self.logits is not None and wanted == Wanted(logits=True):
            return Captured(self.logits[torch.from_numpy(batch.indices)].to(batch.labels.device))
        features = batch.features if self.shared else self._own_features(batch)
        with torch.no_grad():
            if self.origin is None:
                return self.capture(features, wanted)
            return self.capture(features, wanted.in_teacher(self.origin)).restricted_to(self.origin)

    def _own_features(self, batch: Batch) -> dict[str, Tensor]:
        features = on_device(self.rows.batch(batch.indices), batch.labels.device)
        return features if self.masking is None else self.masking(features, batch.indices, batch.step)


@dataclass(frozen=True)
class Targets:
    """Soft targets in place of a teacher: no model runs."""

    logits: Tensor
    """Log-probabilities or logits for all training rows, float32 `[n, C]`."""

    def __call__(self, batch: Batch, wanted: Wanted) -> Captured:
        """Returns the targets of a batch; losses must want logits alone."""
        assert not wanted.internals, "targets have no hidden states"
        return Captured(self.logits[torch.from_numpy(batch.indices)].to(batch.labels.device)) if wanted.logits else NOTHING


@dataclass
class Pair:
    """The student, its teacher or teachers, and the training rows."""

    student: Capture
    teachers: tuple[Teacher | Targets, ...]
    rows: Rows
    """The training rows as inputs of the student."""
    labels: Labels
    """Class ids or regression targets `[n]`; arbitrary for unlabelled rows."""
    seed: int
    """Seed for random draws of losses."""
    num_labelled: int | None = None
    """Number of labelled rows, which come first; None if all are labelled."""
    weights: tuple[float, ...] = (1.0,)
    """Weight of each teacher; they add up to 1."""
    masking: Masking | None = None
    """Masks tokens of masked copies."""
    on_policy: Callable[[nn.Module, Batch], Batch | None] | None = None
    """Lets the student write the answers of some steps; it returns None in the others."""

    @property
    def teacher(self) -> Teacher:
        """The only teacher, for losses that run a model."""
        [teacher] = self.teachers[:1]
        assert isinstance(teacher, Teacher), "targets are no model"
        return teacher

    def labelled(self, *indices: NDArray[np.int64]) -> Tensor | None:
        """Returns which batch positions are labelled in every given list of rows, bool `[b]`; None if all rows are labelled."""
        if self.num_labelled is None:
            return None
        return torch.from_numpy(np.logical_and.reduce([rows < self.num_labelled for rows in indices]))


@contextmanager
def about(key: str) -> Iterator[None]:
    """Rewrites the key paths in errors about an external model to the teacher's.

    Args:
        key: Key path of the teacher.
    """
    try:
        yield
    except InputError as error:
        problems = [replace(problem, remedy=FITTING) if NEW_HEAD in problem.remedy else problem for problem in error.problems]
        raise InputError.of(problem.renamed("model.path", key) for problem in problems) from error


def tokens_of(preprocessor: Preprocessor) -> tuple[Any, ...]:
    """Returns everything that determines the tokens of a text: the contents of tokenizer.json, the maximum length and the padding."""
    tokenizer = None if preprocessor.tokenizer is None else preprocessor.tokenizer.to_str()
    return tokenizer, preprocessor.max_length, preprocessor.pad_token_id, preprocessor.pad_token_type_id


def inputs_of(preprocessor: Preprocessor) -> tuple[Any, ...]:
    """Returns everything that determines the inputs of a row: tokens and input names, or what is done to an image or a sound."""
    return *tokens_of(preprocessor), preprocessor.input_names, preprocessor.image, preprocessor.sound


class InputMatch(NamedTuple):
    """How far two models get the same inputs for the same rows; each field implies the ones before."""

    tokens: bool
    """Equal tokens, or pixels."""
    ids: bool
    """Equal token ids."""
    inputs: bool
    """Every input is equal."""


def match_inputs(student: Preprocessor, teacher: Preprocessor, rows: Sequence[Row]) -> InputMatch:
    """Compares the inputs that two models get for all rows.

    Tokens are equal if their strings are: a model with a reduced vocabulary has other ids for the same tokens. If the tokenizers differ,
    all texts are tokenized by both. Of images and sounds only the first `PROBED_IMAGES` are compared, as their preprocessing has few
    parameters.
    Blocks of text-generation are token ids already: they mean the same to both models if the vocabularies are equal.
    """
    if student.generates:
        assert student.tokenizer is not None
        assert teacher.tokenizer is not None
        same = student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()
        return InputMatch(same, same, same)
    if student.modality != "text":
        equal = _equal(student.encode(rows[:PROBED_IMAGES]), teacher.encode(rows[:PROBED_IMAGES]))
        pixels = equal.get(student.input_names[0], False)
        return InputMatch(pixels, pixels, all(equal.values()))
    if tokens_of(student) == tokens_of(teacher):
        return InputMatch(True, True, set(student.input_names) == set(teacher.input_names))
    mapped, same_ids, same_inputs = _id_map(student, teacher), True, True
    for start in range(0, len(rows), CHUNK):
        ours, theirs = (side.encode(rows[start : start + CHUNK], 0) for side in (student, teacher))
        mask = ours["attention_mask"].astype(bool)  # padding ids may differ
        if not np.array_equal(mask, theirs["attention_mask"]):
            return InputMatch(False, False, False)
        if not np.array_equal(mapped[ours["input_ids"][mask]], theirs["input_ids"][mask]):
            return InputMatch(False, False, False)
        equal = _equal(ours, theirs)
        same_ids, same_inputs = same_ids and equal["input_ids"], same_inputs and all(equal.values())
    return InputMatch(True, same_ids, same_inputs)


def _id_map(source: Preprocessor, target: Preprocessor) -> NDArray[np.int64]:
    """Returns for each token id of the source tokenizer the id of the same token in the target tokenizer, or -1."""
    assert source.tokenizer is not None
    assert target.tokenizer is not None
    source_ids, target_ids = source.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    mapped = np.full(max(source_ids.values()) + 1, -1)
    mapped[list(source_ids.values())] = [target_ids.get(token, -1) for token in source_ids]
    return mapped


def _equal(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> dict[str, bool]:
    """Returns for each input name whether both sides have it, with equal values."""
    return {name: name in ours and name in theirs and np.array_equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys()}
