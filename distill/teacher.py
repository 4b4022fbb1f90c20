"""The teacher: frozen, in evaluation mode, and asked as rarely as possible.

Where no loss needs more of it than logits they are computed once, for all training rows, and kept in one file in the scratch folder of
the stage, named by everything they depend on; a resumed training reads the same bits. Where a loss looks inside of the teacher it runs
on every batch, without gradient. A teacher with another tokenizer gets the rows in its own tokens, which serves for logits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.artifacts.artifact import digest, writing
from compress.core.errors import InputError
from compress.core.progress import Progress
from compress.machine.parallel import ALONE, Team, without_gradients
from compress.models.forward import device_of, forward
from compress.models.origin import Origin
from compress.training.distilled import tokens_of
from compress.training.rows import CHUNK, Rows
from compress.training.train import Batch, autocast_dtype
from distill.capture import Capture, Captured, Wanted
from distill.masking import Masking

if TYPE_CHECKING:
    from compress.standalone.preprocess import Preprocessor

FITTING = "; give a model that was trained for this task and these labels"
BATCH_SIZE = 64
CACHE_BYTES = 2**30
"""Logits are kept up to this size; beyond it the teacher runs on every batch."""
PROBED_IMAGES = 64
NOTHING = Captured(torch.empty(0))
"""What was captured of a model that nothing is wanted of."""
FILE = "logits.safetensors"


@dataclass
class Teacher:
    """A frozen model that answers for training rows."""

    capture: Capture
    rows: Rows
    """The training rows as this model takes them."""
    shared: bool
    """Whether the student takes them the same way, so that the features of a batch serve for both."""
    logits: Tensor | None = None
    """Its answers to all training rows, float32 `[n, C]`, where they are kept."""
    masking: Masking | None = None
    """Hides the tokens of copies; the features of a batch come with theirs hidden."""
    origin: Origin | None = None
    """Where the student's parts come from, if it is a part of this model: then only those are seen of it."""

    def __call__(self, batch: Batch, wanted: Wanted) -> Captured:
        """Returns what is wanted for a batch; no gradient flows into it."""
        if wanted == Wanted():
            return NOTHING
        if self.logits is not None and wanted == Wanted(logits=True):
            return Captured(self.logits[torch.from_numpy(batch.indices)].to(batch.labels.device))
        features = batch.features if self.shared else self._own(batch)
        with torch.no_grad():
            if self.origin is None:
                return self.capture(features, wanted)
            return self.capture(features, wanted.at(self.origin)).part(self.origin)

    def _own(self, batch: Batch) -> dict[str, Tensor]:
        features = on_device(self.rows.batch(batch.indices), batch.labels.device)
        return features if self.masking is None else self.masking(features, batch.indices, batch.step)


@dataclass
class Pair:
    """Student and teacher, or teachers, and the rows they learn from."""

    student: Capture
    teachers: tuple[Teacher, ...]
    rows: Rows
    """The training rows as the student takes them."""
    labels: NDArray[Any]
    """Class ids or values `[n]`; anything for rows that have none."""
    seed: int
    """Seed of whatever a loss draws."""
    num_labelled: int | None = None
    """Rows that have labels, the first ones; None for all."""
    weights: tuple[float, ...] = (1.0,)
    """Of the teachers; they add up to 1."""
    masking: Masking | None = None
    """Hides the tokens of copies."""

    @property
    def teacher(self) -> Teacher:
        """The teacher of losses that look inside of it."""
        return self.teachers[0]

    def labelled(self, *indices: NDArray[np.int64]) -> Tensor | None:
        """Returns which rows of a batch have labels, bool `[b]`, in each of some lists of rows; None where all have."""
        if self.num_labelled is None:
            return None
        return torch.from_numpy(np.logical_and.reduce([rows < self.num_labelled for rows in indices]))


@contextmanager
def about(key: str) -> Iterator[None]:
    """Lets the messages about a model from outside speak of the teacher.

    Args:
        key: Key path of the teacher.
    """
    try:
        yield
    except InputError as error:
        problems = [re.sub(r"; (rename them, or )?give model\.head: new.*", FITTING, problem) for problem in error.problems]
        raise InputError(*(problem.replace("model.path", key) for problem in problems)) from error


def freeze(model: nn.Module) -> nn.Module:
    """Puts a model into evaluation mode and takes its gradients away; returns it."""
    return model.eval().requires_grad_(False)


class Alike(NamedTuple):
    """What two models get for the same rows."""

    tokens: bool
    """The same tokens, or pixels."""
    numbers: bool
    """Which have the same numbers in both."""
    inputs: bool
    """And every input is the same."""


def takes_the_same(student: Preprocessor, teacher: Preprocessor, rows: Sequence[Any]) -> Alike:
    """Returns what two models get alike for all rows.

    Tokens are the same that are written alike: a model whose vocabulary was cut has other numbers for them. Texts are tokenized by both
    where the tokenizers differ; of images the first `PROBED_IMAGES` are looked at, as they are prepared by a few numbers. Blocks of
    text-generation are numbers already: they mean the same to both where the vocabularies are equal.
    """
    if student.generates:
        assert student.tokenizer is not None
        assert teacher.tokenizer is not None
        same = student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()
        return Alike(same, same, same)
    if student.modality == "image":
        equal = _equal(student.encode(rows[:PROBED_IMAGES]), teacher.encode(rows[:PROBED_IMAGES]))
        pixels = equal.get("pixel_values", False)
        return Alike(pixels, pixels, all(equal.values()))
    if tokens_of(student) == tokens_of(teacher):
        return Alike(True, True, set(student.input_names) == set(teacher.input_names))
    renumbered, numbers, whole = _numbers_in(teacher, student), True, True
    for start in range(0, len(rows), CHUNK):
        ours, theirs = (side.encode(rows[start : start + CHUNK], 0) for side in (student, teacher))
        held = ours["attention_mask"].astype(bool)  # whatever stands for padding
        if not np.array_equal(held, theirs["attention_mask"]):
            return Alike(False, False, False)
        if not np.array_equal(renumbered[ours["input_ids"][held]], theirs["input_ids"][held]):
            return Alike(False, False, False)
        equal = _equal(ours, theirs)
        numbers, whole = numbers and equal["input_ids"], whole and all(equal.values())
    return Alike(True, numbers, whole)


def _numbers_in(other: Preprocessor, own: Preprocessor) -> NDArray[np.int64]:
    """Returns for the number of every token that one tokenizer writes the number that another one has for it, -1 for none."""
    assert own.tokenizer is not None
    assert other.tokenizer is not None
    theirs = other.tokenizer.get_vocab()
    numbers = own.tokenizer.get_vocab()
    found = np.full(max(numbers.values()) + 1, -1)
    found[list(numbers.values())] = [theirs.get(token, -1) for token in numbers]
    return found


def _equal(ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]) -> dict[str, bool]:
    """Returns for each input of either side whether both have it, with equal values."""
    return {name: name in ours and name in theirs and np.array_equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys()}


def cached_logits(
    model: nn.Module, rows: Rows, identity: Mapping[str, Any], scratch: Path, progress: Progress, label: str, team: Team = ALONE
) -> Tensor:
    """Returns the answers of a model to all rows, float32 `[n, C]` on the CPU; reads them from `scratch` where they are there already.

    Args:
        model: The teacher, on its device.
        rows: The training rows as it takes them.
        identity: What the answers depend on: digests of the teacher and of the rows (JSON types).
        scratch: Folder of the stage.
        progress: Where to tell.
        label: Name of the bar.
        team: The processes that share the work, each with every `size`-th batch; the first one writes.
    """
    from safetensors.torch import load_file, save_file

    device = device_of(model)
    autocast = autocast_dtype(device)
    identity = {**identity, "autocast": str(autocast), "threads": torch.get_num_threads(), "torch": torch.__version__}
    folder = scratch / f"teacher-{digest(identity)[:16]}"
    if team.tell((folder / FILE).exists()):
        progress.log(f"  {label}: the teacher's answers are taken from {folder}")
        return dict(team.spread(load_file(folder / FILE) if team.is_first else {}))["logits"]
    order = np.argsort(-rows.lengths, kind="stable")
    answers: Tensor | None = None
    with without_gradients(model), progress.bar(f"{label}: teacher", len(order)) as advance:
        for start in range(BATCH_SIZE * team.rank, len(order) + BATCH_SIZE * team.rank, BATCH_SIZE * team.size):
            mine = order[start : start + BATCH_SIZE]
            indices = mine if len(mine) else order[:1]  # one that is divided answers where all processes ask
            with torch.autocast(device.type, torch.bfloat16) if autocast == torch.bfloat16 else nullcontext():
                logits = forward(model, on_device(rows.batch(indices), device)).cpu()
            answers = torch.zeros(len(order), logits.shape[1]) if answers is None else answers
            if len(mine):
                answers[torch.from_numpy(indices)] = logits
            advance(min(BATCH_SIZE * team.size, len(order) - start + BATCH_SIZE * team.rank))
    assert answers is not None, "no rows"
    team.add(answers)
    if not team.is_first:
        return answers
    with writing(folder) as temporary:
        save_file({"logits": answers}, temporary / FILE)
    return answers


def on_device(features: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the features on a device."""
    return {name: value.to(device, non_blocking=True) for name, value in features.items()}
