"""Training rows: tokenized once, stored without padding, and batched by similar length.

    epoch: shuffle(seed, epoch) -> windows of 50 batches -> sort each by length -> cut into batches -> shuffle the batches of a window

Sorting within windows needs almost as little padding as sorting all rows, and is almost as random as not sorting. A batch is padded to its
longest row, rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundation.core.runs import rows_of
from foundation.standalone.preprocess import INPUTS, Preprocessor, Row

MULTIPLE = 8
WINDOW = 50
CHUNK = 1024
IMAGE_CACHE_BYTES = 2**30
"""Preprocessed images and sounds up to this size stay in memory; otherwise they are preprocessed again for each batch."""


@dataclass(frozen=True)
class ByLength:
    """Rows sorted by length; rows of equal length in a fixed random order."""

    order: NDArray[np.int64]
    """Index of the row at each position `[n]`."""
    rank: NDArray[np.int64]
    """Position of each row `[n]`."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> ByLength:
        """Sorts rows of these lengths `[n]`."""
        order = np.lexsort((np.random.default_rng(0).permutation(len(lengths)), lengths))
        return cls(order, np.argsort(order))


@dataclass(frozen=True)
class Rows:
    """Training rows, ready for batching."""

    preprocessor: Preprocessor
    """The preprocessor of the rows."""
    rows: Sequence[Row]
    """The raw rows, used again only for images and sounds that do not fit in memory."""
    lengths: NDArray[np.int64]
    """Tokens or samples of each row `[n]`; 0 for rows of one size."""
    tokens: dict[str, NDArray[Any]]
    """Texts, and waveforms that fit in memory: the values of each input, with all rows concatenated; else empty."""
    pixels: NDArray[np.float32] | None
    """Images and spectrograms that fit in memory: float32 `[n, ...]`."""
    towers: Mapping[str, tuple[Rows, NDArray[np.int64]]] = field(default_factory=dict)
    """For images and texts: the rows of each tower, and the place of every row in its tower, -1 for rows of the other one `[n]`."""

    @classmethod
    def prepare(cls, rows: Sequence[Row], preprocessor: Preprocessor) -> Rows:
        """Tokenizes texts, takes blocks and pairs of tokens as they are, and preprocesses images and sounds if they fit in memory."""
        if preprocessor.towers:
            return cls._of_towers(rows, preprocessor)
        if preprocessor.modality == "audio" and preprocessor.buckets:
            return cls._waveforms(rows, preprocessor)
        if preprocessor.modality != "text":
            size = preprocessor.encode(rows[:1])[preprocessor.input_names[0]].nbytes * len(rows)
            pixels = preprocessor.encode(rows)[preprocessor.input_names[0]] if size <= IMAGE_CACHE_BYTES else None
            return cls(preprocessor, rows, np.zeros(len(rows), np.int64), {}, pixels)
        tokenized = [row for start in range(0, len(rows), CHUNK) for row in preprocessor.tokenized(rows[start : start + CHUNK])]
        lengths = np.array([row.shape[1] for row in tokenized])
        tokens = {name: np.concatenate([row[INPUTS.index(name)] for row in tokenized]) for name in preprocessor.input_names}
        return cls(preprocessor, rows, lengths, tokens, None)

    @classmethod
    def _of_towers(cls, rows: Sequence[Row], preprocessor: Preprocessor) -> Rows:
        """Prepares images and texts apart."""
        lengths, towers = np.zeros(len(rows), np.int64), {}
        for name, members in preprocessor.members(rows).items():
            part = cls.prepare([rows[index] for index in members], preprocessor.towers[name])
            place = np.full(len(rows), -1, np.int64)
            place[members], lengths[members] = np.arange(len(members)), part.lengths
            towers[name] = part, place
        return cls(preprocessor, rows, lengths, {}, None, towers)

    @classmethod
    def _waveforms(cls, rows: Sequence[Row], preprocessor: Preprocessor) -> Rows:
        """Decodes waveforms; keeps them if they fit in memory, else their lengths alone."""
        kept: list[NDArray[np.float32]] = []
        lengths: list[int] = []
        for start in range(0, len(rows), CHUNK):
            made = preprocessor.sounds.prepared(rows[start : start + CHUNK])
            lengths += map(len, made)
            kept = [*kept, *made] if 4 * sum(lengths) <= IMAGE_CACHE_BYTES else []
        tokens: dict[str, NDArray[Any]] = {}
        if kept:
            values = np.concatenate(kept)
            tokens = dict(zip(preprocessor.input_names, (values, np.ones(len(values), np.int32)), strict=False))
        return cls(preprocessor, rows, np.array(lengths), tokens, None)

    @cached_property
    def by_length(self) -> ByLength:
        """The rows sorted by length."""
        return ByLength.of(self.lengths)

    @cached_property
    def first_equal(self) -> NDArray[np.int64]:
        """Index of the first row with equal tokens, int64 `[n]`. A row that is not stored as tokens has its own index."""
        indices, first = np.arange(len(self.lengths)), dict[bytes, int]()
        if self.tokens:
            for index, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
                content = b"".join(values[start : start + length].tobytes() for values in self.tokens.values())
                indices[index] = first.setdefault(sha256(content).digest(), index)
        return indices

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Position of the first token of each row in `tokens` `[n]`."""
        return np.cumsum(self.lengths) - self.lengths

    def batch(self, indices: NDArray[np.int64], beside: NDArray[np.int64] | None = None) -> dict[str, Tensor]:
        """Returns the features of some rows: int64 or float32 `[b, L]` each, or float32 `[b, ...]`; of images and texts the features of
        both.

        Args:
            indices: The rows.
            padded_with: Rows to pad to the same length, such as rows of other processes; None: no others.
        """
        longest = int(self.lengths[indices if beside is None else np.concatenate([indices, beside])].max()) if not self.towers else 0
        if self.towers:
            own = {name: (part, place[indices][place[indices] >= 0]) for name, (part, place) in self.towers.items()}
            return {name: values for part, places in own.values() if len(places) for name, values in part.batch(places).items()}
        if not self.tokens:
            if self.pixels is not None:
                return {self.preprocessor.input_names[0]: torch.from_numpy(self.pixels[indices])}
            length = self._width(longest) if self.preprocessor.buckets else None
            encoded = self.preprocessor.encode([self.rows[i] for i in indices], length)
            return {name: torch.from_numpy(values) for name, values in encoded.items()}
        lengths = self.lengths[indices]
        width = self._width(longest)
        inside = np.arange(width) < lengths[:, None]
        flat = np.concatenate([np.arange(start, start + length) for start, length in zip(self.starts[indices], lengths, strict=True)])
        padding = self.preprocessor.padding
        features = {}
        for name, values in self.tokens.items():
            padded = np.full(inside.shape, padding.get(name, 0), np.float32 if values.dtype == np.float32 else np.int64)
            padded[inside] = values[flat]
            features[name] = torch.from_numpy(padded)
        return features

    def _width(self, longest: int) -> int:
        """Returns the length that a batch is padded to: the server's length where a model takes no mask of padding."""
        if "attention_mask" not in self.preprocessor.input_names and self.preprocessor.modality == "audio":
            return next(bucket for bucket in self.preprocessor.buckets if bucket >= longest)
        if len(self.preprocessor.buckets) == 1 and self.preprocessor.dimensions and "attention_mask" not in self.preprocessor.input_names:
            return self.preprocessor.max_length  # a tower that reads padding has only one length
        return min(-(-longest // MULTIPLE) * MULTIPLE, self.preprocessor.max_length)


def plan_runs(lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int, sizes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Like `plan_epoch`, for runs of rows that belong together: all rows of a run are in one batch, one after the other.

    Every batch but the last has the same number of runs, as many as fit where each is as long as the longest.

    Args:
        lengths: Tokens of each row `[n]`.
        batch_size: Most rows of a batch, at least the rows of the longest run.
        seed: Seed of the training.
        epoch: Index of the epoch, from 0.
        sizes: Rows of each run `[r]` (`foundation.core.runs`): 2 for pairs, 3 for triplets, more with several negatives.
    """
    longest = int(sizes.max())
    assert batch_size >= longest, (batch_size, longest)
    lengths_r = np.maximum.reduceat(lengths, np.cumsum(sizes) - sizes)
    return [rows_of(sizes, chosen) for chosen in plan_epoch(lengths_r, batch_size // longest, seed, epoch)]


def plan_epoch(lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int, window: int = WINDOW) -> list[NDArray[np.int64]]:
    """Returns the batches of an epoch as arrays of row indices; every row occurs once, and only the last batch may be smaller.

    Args:
        lengths: Tokens of each row `[n]`.
        batch_size: Rows of a batch.
        seed: Seed of the training.
        epoch: Index of the epoch, from 0.
        window: Number of batches whose rows are sorted by length together.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), batch_size * window):
        part = order[start : start + batch_size * window]
        part = part[np.argsort(lengths[part], kind="stable")]
        cut = [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        batches += [cut[i] for i in random.permutation(len(cut))]
    return batches
