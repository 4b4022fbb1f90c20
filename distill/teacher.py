"""The teacher: frozen, in evaluation mode, and run as rarely as possible.

If all losses need only logits, these are computed once for all training rows and cached in a file in the stage's scratch folder, named by
everything they depend on; a resumed training reads the same bits. If a loss needs hidden states or attention, the teacher runs on every
batch, without gradient. A teacher with a different tokenizer gets the rows in its own tokens, which is sufficient for losses on logits.
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
from compress.training.precision import autocast_dtype, dtype_for
from compress.training.rows import CHUNK, Rows
from compress.training.train import Batch
from distill.capture import Capture, Captured, Wanted
from distill.masking import Masking
from distill.on_policy import Sampling

if TYPE_CHECKING:
    from compress.standalone.preprocess import Preprocessor

FITTING = "; give a model that was trained for this task and these labels"
BATCH_SIZE = 64
CACHE_BYTES = 2**30
"""Logits are cached up to this size; beyond it the teacher runs on every batch."""
PROBED_IMAGES = 64
NOTHING = Captured(torch.empty(0))
"""The result for a model of which nothing is to be captured; it did not run."""
FILE = "logits.safetensors"


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
        """Returns what is wanted for a batch, detached."""
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


@dataclass
class Pair:
    """The student, its teacher or teachers, and the training rows."""

    student: Capture
    teachers: tuple[Teacher, ...]
    rows: Rows
    """The training rows as inputs of the student."""
    labels: NDArray[Any]
    """Class ids or regression targets `[n]`; arbitrary for unlabelled rows."""
    seed: int
    """Seed for random draws of losses."""
    num_labelled: int | None = None
    """Number of labelled rows, which come first; None if all are labelled."""
    weights: tuple[float, ...] = (1.0,)
    """Weight of each teacher; they add up to 1."""
    masking: Masking | None = None
    """Masks tokens of masked copies."""
    on_policy: Sampling | None = None
    """Lets the student write the answers of some steps."""

    @property
    def teacher(self) -> Teacher:
        """The only teacher, for losses that use hidden states or attention."""
        return self.teachers[0]

    def labelled(self, *indices: NDArray[np.int64]) -> Tensor | None:
        """Returns which batch positions are labelled in every given list of rows, bool `[b]`; None if all rows are labelled."""
        if self.num_labelled is None:
            return None
        return torch.from_numpy(np.logical_and.reduce([rows < self.num_labelled for rows in indices]))


@contextmanager
def about(key: str) -> Iterator[None]:
    """Rewrites the key paths in errors about an external model to those of the teacher.

    Args:
        key: Key path of the teacher.
    """
    try:
        yield
    except InputError as error:
        problems = [re.sub(r"; (rename them, or )?give model\.head: new.*", FITTING, problem) for problem in error.problems]
        raise InputError(*(problem.replace("model.path", key) for problem in problems)) from error


def freeze(model: nn.Module) -> nn.Module:
    """Returns the model in evaluation mode, with gradients disabled for its parameters."""
    return model.eval().requires_grad_(False)


class InputMatch(NamedTuple):
    """How far two models get the same inputs for the same rows; each field implies the ones before."""

    tokens: bool
    """Equal tokens, or pixels."""
    ids: bool
    """Equal token ids."""
    inputs: bool
    """Every input is equal."""


def match_inputs(student: Preprocessor, teacher: Preprocessor, rows: Sequence[Any]) -> InputMatch:
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


def _equal(ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]) -> dict[str, bool]:
    """Returns for each input name whether both sides have it, with equal values."""
    return {name: name in ours and name in theirs and np.array_equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys()}


def cached_logits(
    model: nn.Module, rows: Rows, identity: Mapping[str, Any], scratch: Path, progress: Progress, label: str, team: Team = ALONE
) -> Tensor:
    """Returns a model's logits for all rows, float32 `[n, C]` on the CPU; reads them from `scratch` if they are cached.

    Args:
        model: The teacher, on its device.
        rows: The training rows as inputs of the teacher.
        identity: What the logits depend on: digests of the teacher and of the rows (JSON types).
        scratch: Scratch folder of the stage.
        progress: Log and progress bar.
        label: Label of the bar.
        team: The processes that share the work: each computes every `size`-th batch; the first one writes.
    """
    from safetensors.torch import load_file, save_file

    device = device_of(model)
    few = on_device(rows.batch(np.arange(min(2, len(rows.lengths)))), device)
    autocast = autocast_dtype(device)
    if not team.shards:  # one process alone cannot run a sharded model
        autocast = dtype_for(model, few, autocast, label, progress)
    identity = {**identity, "autocast": str(autocast), "threads": torch.get_num_threads(), "torch": torch.__version__}
    folder = scratch / f"teacher-{digest(identity)[:16]}"
    if team.broadcast((folder / FILE).exists()):
        progress.log(f"  {label}: reading cached teacher logits from {folder}")
        return dict(team.spread(load_file(folder / FILE) if team.is_first else {}))["logits"]
    order = np.argsort(-rows.lengths, kind="stable")
    all_logits: Tensor | None = None
    with without_gradients(model), progress.bar(f"{label}: teacher", len(order)) as advance:
        for start in range(BATCH_SIZE * team.rank, len(order) + BATCH_SIZE * team.rank, BATCH_SIZE * team.size):
            mine = order[start : start + BATCH_SIZE]
            indices = mine if len(mine) else order[:1]  # a sharded model runs only if all processes run it together
            with torch.autocast(device.type, torch.bfloat16) if autocast == torch.bfloat16 else nullcontext():
                logits = forward(model, on_device(rows.batch(indices), device)).cpu()
            all_logits = torch.zeros(len(order), logits.shape[1]) if all_logits is None else all_logits
            if len(mine):
                all_logits[torch.from_numpy(indices)] = logits
            advance(min(BATCH_SIZE * team.size, len(order) - start + BATCH_SIZE * team.rank))
    assert all_logits is not None, "no rows"
    team.add(all_logits)
    if not team.is_first:
        return all_logits
    with writing(folder) as temporary:
        save_file({"logits": all_logits}, temporary / FILE)
    return all_logits


def on_device(features: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns the features on a device."""
    return {name: value.to(device, non_blocking=True) for name, value in features.items()}
