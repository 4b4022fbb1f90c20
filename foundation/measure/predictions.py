"""Predictions of a model in torch, held in memory or streamed layer by layer from its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from foundation.core.arrays import Array
from foundation.core.progress import Progress
from foundation.labels.tasks import TASKS, Task
from foundation.machine.process import freed_memory_returned
from foundation.measure.answers import compressed, gathered
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward, modes_kept
from foundation.models.streaming import StreamedModel, is_large, meta_model, structure_problem
from foundation.schemes.sites import load_sites
from foundation.standalone.preprocess import Preprocessor, Row
from foundation.standalone.windows import merged

STEP = 16


def predict(model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Row], batch_size: int, progress: Progress | None = None) -> Array:
    """Returns the predictions for `rows` (see `compressed`) in row order; a row is padded to its bucket, as in the engines and the server.

    Raises:
        InputError: A prediction is NaN or infinite; the message names the row.
    """
    found = logits_of(model, preprocessor, rows, batch_size, progress)
    answers = ((indices, compressed(preprocessor, [rows[index] for index in indices], logits)) for indices, logits in found)
    return gathered(answers, len(rows))


def logits_of(
    model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Row], batch_size: int, progress: Progress | None = None
) -> Iterator[tuple[list[int], Array]]:
    """Yields for each batch its row indices and logits, float32 `[b, C]`, or `[b, L, V]` for generation; runs in evaluation mode. Where
    texts are read in windows, all rows are one batch."""
    found = _of_batches(model, preprocessor, rows, batch_size, progress)
    if not preprocessor.aggregate:
        yield from found
    elif rows:
        yield list(range(len(rows))), merged(found, len(rows), preprocessor.aggregate)


def _of_batches(
    model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Row], batch_size: int, progress: Progress | None = None
) -> Iterator[tuple[list[int], Array]]:
    seen: set[int] = set()
    with modes_kept(model), progress.bar("predict", len(rows)) if progress else nullcontext() as advance:
        model.eval()
        for indices, features in preprocessor.batches(rows, batch_size):
            with torch.no_grad():
                logits = forward(model, {name: torch.from_numpy(value) for name, value in features.items()}).cpu().numpy()
            yield indices, logits
            if advance is not None:
                advance(len(indices) if not preprocessor.aggregate else len(set(indices) - seen))
                seen |= set(indices)


def compared(model: nn.Module, preprocessor: Preprocessor, rows: Sequence[Row], batch_size: int) -> Array:
    """Like `predict`, but pads texts `finely`: faster, for predictions that are only compared with each other."""
    return predict(model, finely(preprocessor), rows, batch_size)


def finely(preprocessor: Preprocessor) -> Preprocessor:
    """Returns a preprocessor that pads texts to the next multiple of `STEP` tokens instead of the served lengths."""
    if preprocessor.modality != "text":
        return preprocessor
    return replace(preprocessor, buckets=tuple(range(STEP, preprocessor.max_length, STEP)) + (preprocessor.max_length,))


def predicts_streamed(folder: Path, task: Task) -> bool:
    """Whether a checkpoint is a large language model that `predict_streamed` supports."""
    if not TASKS[task].generates or not is_large(Checkpoint(folder)) or structure_problem(meta_model(Checkpoint(folder).config)[0]):
        return False
    return not (Checkpoint(folder).is_quantized and load_sites(folder).names)


def predict_streamed(
    folder: Path, preprocessor: Preprocessor, rows: Sequence[Row], batch_size: int, scratch: Path, progress: Progress | None = None
) -> Array:
    """Like `predict`, for a checkpoint that is streamed from its files layer by layer."""

    model = StreamedModel(folder)
    with freed_memory_returned(), torch.no_grad():
        batches, _ = model.batches(preprocessor, rows, scratch, batch_size)
        order = range(len(model))
        for index in progress.track(order, "predict", len(model)) if progress else order:
            with model.layer(index) as layer:
                for batch in batches:
                    batch.hidden.copy_(model.run(index, layer, batch.inputs))
        answers = (
            (batch.indices, compressed(preprocessor, [rows[i] for i in batch.indices], model.logits(batch.inputs).numpy()))
            for batch in batches
        )
        return gathered(answers, len(rows))
