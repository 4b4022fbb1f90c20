"""Training rows: tokenized once, stored without padding, and batched by similar length.

    epoch: shuffle(seed, epoch) -> windows of 50 batches -> sort each by length -> cut into batches -> shuffle the batches of a window

Sorting within windows needs almost as little padding as sorting all rows, and is almost as random as not sorting. A batch is padded to its
longest row, rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.standalone.preprocess import INPUTS, Preprocessor

MULTIPLE = 8
WINDOW = 50
CHUNK = 1024
IMAGE_CACHE_BYTES = 2**30
"""Preprocessed images up to this size stay in memory; otherwise they are preprocessed again for each batch."""


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
    rows: Sequence[Any]
    """The raw rows, used again only for images that do not fit in memory."""
    lengths: NDArray[np.int64]
    """Tokens of each row `[n]`; 0 for images."""
    tokens: dict[str, NDArray[np.int32]]
    """Text: the values of each input, with all rows concatenated; empty for images."""
    pixels: NDArray[np.float32] | None
    """Images that fit in memory: float32 `[n, channels, H, W]`."""

    @classmethod
    def prepare(cls, rows: Sequence[Any], preprocessor: Preprocessor) -> Rows:
        """Tokenizes texts, takes blocks and pairs of tokens as they are, and preprocesses images if they fit in memory."""
        if preprocessor.modality == "image":
            size = preprocessor.encode(rows[:1])[preprocessor.input_names[0]].nbytes * len(rows)
            pixels = preprocessor.encode(rows)[preprocessor.input_names[0]] if size <= IMAGE_CACHE_BYTES else None
            return cls(preprocessor, rows, np.zeros(len(rows), np.int64), {}, pixels)
        tokenized = [row for start in range(0, len(rows), CHUNK) for row in preprocessor.tokenized(rows[start : start + CHUNK])]
        lengths = np.array([row.shape[1] for row in tokenized])
        tokens = {name: np.concatenate([row[INPUTS.index(name)] for row in tokenized]) for name in preprocessor.input_names}
        return cls(preprocessor, rows, lengths, tokens, None)

    @cached_property
    def by_length(self) -> ByLength:
        """The rows sorted by length."""
        return ByLength.of(self.lengths)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Position of the first token of each row in `tokens` `[n]`."""
        return np.cumsum(self.lengths) - self.lengths

    def batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns the features of some rows: int64 `[b, L]` each, or float32 `[b, channels, H, W]`."""
        if not self.tokens:
            name = self.preprocessor.input_names[0]
            if self.pixels is not None:
                return {name: torch.from_numpy(self.pixels[indices])}
            return {name: torch.from_numpy(self.preprocessor.encode([self.rows[i] for i in indices])[name])}
        lengths = self.lengths[indices]
        width = min(-(-int(lengths.max()) // MULTIPLE) * MULTIPLE, self.preprocessor.max_length)
        inside = np.arange(width) < lengths[:, None]
        flat = np.concatenate([np.arange(start, start + length) for start, length in zip(self.starts[indices], lengths, strict=True)])
        padding = self.preprocessor.padding
        features = {}
        for name, values in self.tokens.items():
            padded = np.full(inside.shape, padding[name], np.int64)
            padded[inside] = values[flat]
            features[name] = torch.from_numpy(padded)
        return features


def plan_pairs(lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Like `plan_epoch`, for rows of which the first two, the next two, ... are pairs: both are in the same batch, one after the other.

    Args:
        lengths: Tokens of each row `[n]`, n even.
        batch_size: Rows of a batch, even.
        seed: Seed of the training.
        epoch: Index of the epoch, from 0.
    """
    assert batch_size % 2 == 0, batch_size
    batches = plan_epoch(lengths.reshape(-1, 2).max(axis=1), batch_size // 2, seed, epoch)
    return [np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1) for pairs in batches]


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
